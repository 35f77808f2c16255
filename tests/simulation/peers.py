"""What members ask of each other beside collectives: states, manifests, whether there is a way between them.

In place of the calls of `elastic.take` and `elastic.take_shards`: the same order of events, over the simulated network.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simulation.state import Content, Copy, Plan

from paceline._elastic.peer_calls import Holder
from paceline._links.base import Peer
from paceline.errors import LinkUnavailable, PacelineError
from paceline_protocol import Tag

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World

__all__ = ["Peers"]


class Peers:
    """The calls of all members of a world; each runs on the loop of the process that asks."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def take_state(
        self, job: str, tag: Tag, donors: Sequence[Peer], own: Any, patience: float, credentials: Any, *, received: Any
    ) -> Copy:
        """See `peer_calls.take_state`."""
        taker = self._asker()
        if taker.take_fails:
            taker.take_fails = False
            await asyncio.sleep(self._world.delay(0.005, 0.3))
            raise LinkUnavailable(f"no member sent the state {tag}: it was told to fail")
        failures = []
        for peer in self._world.rng.sample(donors, len(donors)):
            try:
                content, offered, epoch = await self._open(taker, peer, tag, patience)
                rest = copy.deepcopy(content.tree())
                await asyncio.sleep(self._world.delay(0.005, 0.3))
                self._check_there(taker, peer)
                offered._check(epoch, tag)
            except PacelineError as error:
                failures.append(f"{peer}: {error}")
                continue
            self._world.note(taker.name, f"takes {tuple(tag)} from {self._world.by_id[peer.member_id].name}")
            return Copy(rest)
        raise LinkUnavailable(f"no member sent the state {tag}: " + "; ".join(failures))

    async def take_shards(
        self,
        job: str,
        tag: Tag,
        holders: Sequence[Holder],
        plan: Plan,
        patience: float,
        credentials: Any,
        *,
        received: Any,
    ) -> None:
        """See `peer_calls.take_shards`."""
        if not plan.wanted:
            return
        taker = self._asker()
        if plan.is_copy:
            self._world.moment("copies", taker)
        if taker.take_fails:
            taker.take_fails = False
            await asyncio.sleep(self._world.delay(0.005, 0.3))
            raise LinkUnavailable(f"no member sent a part of the state {tag}: it was told to fail")
        opened, failures = [], []
        for holder in holders:
            if holder.shares and holder.peer.member_id != taker.member_id:
                try:
                    opened.append((holder.peer, *await self._open(taker, holder.peer, tag, patience)))
                except PacelineError as error:
                    failures.append(f"{holder.peer}: {error}")
        await asyncio.sleep(self._world.delay(0.005, 0.3))
        given, names = [], []
        for peer, content, offered, epoch in opened:
            try:
                self._check_there(taker, peer)
                offered._check(epoch, tag)
                given.append(dict(content.parts))
                names.append(self._world.by_id[peer.member_id].name)
            except PacelineError as error:
                failures.append(f"{peer}: {error}")
        if not plan.fill(given):
            raise LinkUnavailable(f"no member sent some of {tag}: " + "; ".join(failures))
        self._world.note(taker.name, f"takes {tuple(plan.share)} of {tuple(tag)} from {' '.join(names)}")

    async def out_of_reach(
        self, job: str, members: Sequence[Peer], own: Any, patience: float, credentials: Any
    ) -> list[str]:
        """See `peer_calls.out_of_reach`: from here to there, and back."""
        asker, network = self._asker(), self._world.network
        self._world.moment("knock")
        started, troubles, longest = self._world.clock.now, [], 0.0
        await asyncio.sleep(self._world.delay(0.001, 0.05))
        for member in members:
            process = self._world.by_id[member.member_id]
            if not network.reaches(asker.name, process.name) or process.frozen:
                troubles.append(f"{member} does not answer")
                longest = patience
            elif not process.alive:
                troubles.append(f"{member} does not answer: Connection refused")
            elif not process.believes(asker) or not asker.believes(process):
                troubles.append(f"{member} does not take the caller for one of its job")
        if longest:
            await asyncio.sleep(started + longest - self._world.clock.now)
        return troubles

    async def get_manifest(self, job: str, donor: Peer, patience: float, credentials: Any) -> bytes:
        """See `peer_calls.get_manifest`: all are alike here."""
        raise AssertionError("no member trains anything else")

    def _asker(self) -> Process:
        return asyncio.get_running_loop().process  # type: ignore[attr-defined, no-any-return]

    async def _open(self, taker: Process, peer: Peer, tag: Tag, patience: float) -> tuple[Content, Any, int]:
        """What a member offers, once it has answered."""
        world = self._world
        donor = world.by_id[peer.member_id]
        await asyncio.sleep(world.delay(0.001, 0.03))
        give_up = world.clock.now + patience
        while donor.alive and (donor.frozen or not world.network.reaches(taker.name, donor.name)):
            if world.clock.now >= give_up:
                raise LinkUnavailable("it does not answer")
            await asyncio.sleep(0.2)
        self._check_there(taker, peer)
        offered = donor.offered
        content, epoch = offered._get(tag)
        world.moment("take", taker)
        return content, offered, epoch

    def _check_there(self, taker: Process, peer: Peer) -> None:
        donor = self._world.by_id[peer.member_id]
        if not donor.alive or not self._world.network.reaches(taker.name, donor.name) or donor.frozen:
            raise LinkUnavailable("it does not answer any more")
        if donor.window.member_id != peer.member_id or donor.window.source is None:
            raise LinkUnavailable("another member lives there")
        if not donor.believes(taker):
            raise LinkUnavailable("it does not take the caller for one of its job")
