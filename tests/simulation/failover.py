"""Several coordinators on one etcd: the real election, the real storage, on a store and a network that are simulated.

A request to etcd may be lost, its answer too, and now and then it is held back and arrives seconds later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from simulation.coordinator import SETTINGS, Coordinator, SimulatedDispatcher
from simulation.disk import JOB
from simulation.loop import Loop
from simulation.network import Context, refusal

from paceline_server.errors import Refused
from paceline_server.failover import Candidacy, FailoverCoordinator
from paceline_server.services.session import SessionHandlers
from paceline_server.storage.base import StoredJob
from paceline_server.storage.etcd import leader_key
from paceline_server.storage.etcd_address import EtcdAddress
from paceline_server.storage.job_records import JOBS, jobs_of
from paceline_server.storage.shared_keys import Item, KeysUnavailable, LeaderRecord
from support.shared_keys import Node

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["ETCD", "NAMES", "FailoverProcess", "SharedNode"]

T = TypeVar("T")

ETCD = "E"
NAMES = ("K", "L", "M")
"""The hosts of coordinators."""

_PATIENCE = 0.4
"""Seconds for a call, as in `etcd_keys`."""


class SharedNode(Node):
    """The store, and who leads in truth.

    Args:
        world: where.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def record(self) -> LeaderRecord | None:
        """The leader's record."""
        found = self.items.get(leader_key("p"))
        return None if found is None else LeaderRecord.from_bytes(found.value)

    def leader(self) -> Coordinator | None:
        """The coordinator that leads, or has led last."""
        record = self.record
        host = "" if record is None else record.address.partition(":")[0]
        return next((each for each in self._world.coordinators if each.name == host), None)

    def stored(self) -> StoredJob:
        """The job as it is stored."""
        prefix = f"p/{JOBS}"
        items = [item for key, item in sorted(self.items.items()) if key.startswith(prefix.encode())]
        return jobs_of(items, prefix).get(JOB) or StoredJob(JOB)


class _Keys:
    """The client of one coordinator process (`shared_keys.SharedKeys`)."""

    def __init__(self, world: World, owner: FailoverProcess) -> None:
        self._world = world
        self._owner = owner
        self._life = owner.life

    async def get(self, key: bytes) -> Item | None:
        return await self._ask(lambda: self._world.node.items.get(key))

    async def read(self, prefix: bytes) -> list[Item]:
        items = self._world.node.items
        return await self._ask(lambda: [items[key] for key in sorted(items) if key.startswith(prefix)])

    async def swap(
        self,
        key: bytes,
        revision: int,
        value: bytes,
        changes: Mapping[bytes, bytes | None] | None = None,
        emptied: Sequence[bytes] = (),
        held: bytes | None = None,
    ) -> int | Item | None:
        return await self._ask(lambda: self._world.node.swap(key, revision, value, changes or {}, emptied, held))

    async def close(self) -> None:
        pass

    async def _ask(self, call: Callable[[], T]) -> T:
        world, owner = self._world, self._owner
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            if world.network.gets_through(owner.name, ETCD):
                answer = call()
                world.clock.after(world.latency(), come_back, answer)

        def come_back(answer: T) -> None:
            if world.network.gets_through(ETCD, owner.name):
                owner.hear(self._life, owner.loop.call_soon, take, answer)

        def take(answer: T) -> None:
            if not done.done():
                done.set_result(answer)

        held_back = world.rng.random() < 0.02
        world.clock.after(world.delay(0.5, 3.0) if held_back else world.latency(), arrive)
        try:
            async with asyncio.timeout(_PATIENCE):
                return await done
        except TimeoutError:
            raise KeysUnavailable("no answer") from None


class _Server:
    """What serves for one epoch, or refuses (`app.Coordinator`)."""

    http_url = ""

    def __init__(
        self, world: World, owner: FailoverProcess, storage: Any, epoch: int, standby: Callable[[], Refused] | None
    ) -> None:
        self._world = world
        self._owner = owner
        self._epoch = epoch
        self.standby = standby
        world.starting = owner
        if standby is None:
            self.dispatcher = SimulatedDispatcher(world, owner, storage, epoch)
            self.handlers = SessionHandlers(self.dispatcher)

    async def start(self) -> str:
        if self.standby is None:
            self._owner.dispatcher = self.dispatcher
            await self.dispatcher.start()
            self._world.note(self._owner.name, f"leads in epoch {self._epoch}")
            self._world.moment("leads")
        self._owner.server = self
        return f"{self._owner.name}:1"

    def drain(self) -> None:
        if self.standby is None:
            self._world.note(self._owner.name, "leads no longer")
            self.dispatcher.drain()

    async def stop(self, grace: float) -> None:
        if self.standby is None:
            self.dispatcher.drain()
        self._owner.server = None
        self._owner.reset_streams()


class FailoverProcess(Coordinator):
    """One process after the other of one of the coordinators.

    Attributes:
        server: what serves now.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.server: _Server | None = None
        self._process: FailoverCoordinator | None = None

    @property
    def rules(self) -> bool:  # type: ignore[override]
        """True if it leads in truth, whatever it believes."""
        record = self._world.node.record
        return record is not None and self._process is not None and record.name == self._process._name

    @property
    def serves(self) -> bool:  # type: ignore[override]
        """True if it leads, as it believes."""
        return self.server is not None and self.server.standby is None and not self.dispatcher.draining

    @serves.setter
    def serves(self, value: bool) -> None:
        pass

    @rules.setter
    def rules(self, value: bool) -> None:
        pass

    @property
    def stored(self) -> StoredJob:
        """See `Coordinator.stored`."""
        return self._world.node.stored()

    def start(self) -> None:
        """A process starts, as a standby."""
        self.up = True
        self.life += 1
        life = self.life
        self._world.note(self.name, "starts")
        self.loop = Loop(self._world.clock, lambda call, *args: self.hear(life, call, *args))
        self.loops.append(self.loop)
        self.server = None
        settings = replace(SETTINGS, listen=f"{self.name}:1", etcd=EtcdAddress((f"{ETCD}:1",), "p"))

        def make(_: object, *, storage: Any, epoch: int, standby: Any, observer: object) -> Any:
            return _Server(self._world, self, storage, epoch, standby)

        async def begin() -> None:
            self._process = FailoverCoordinator(settings, keys=_Keys(self._world, self), make=make, notice=self._notice)
            await self._process.start()

        self.loop.call_soon(lambda: self.loop.create_task(begin()))

    def crash(self) -> None:
        """See `Coordinator.crash`."""
        super().crash()
        self.server = None

    def resign(self) -> None:
        """It gets SIGTERM, and its process ends."""
        process, life = self._process, self.life
        if process is None or not self.up:
            return
        self._world.note(self.name, "is to stop")

        async def stop() -> None:
            await process.stop()
            if life == self.life:
                self.crash()

        self.loop.call_soon(lambda: self.loop.create_task(stop()))

    def serve(self, context: Context) -> None:
        """See `Coordinator.serve`."""
        server = self.server
        if server is None:
            context.stream.reset()
        elif server.standby is not None:
            context.stream.finish(refusal(server.standby()))
        else:
            self._handlers = server.handlers
            super().serve(context)

    async def _notice(self, candidacy: Candidacy) -> None:
        """As `failover.follow`: connections to a leader that is dead are refused."""
        while True:
            await asyncio.sleep(self._world.delay(0.05, 0.15))
            address = candidacy.election.leader
            other = next((each for each in self._world.coordinators if f"{each.name}:1" == address), None)
            if other is None or not self._world.network.reaches(self.name, other.name):
                continue
            if other.up:
                candidacy.election.reached(address)
            else:
                candidacy.election.refused(self.loop.time(), address)
                candidacy.wake()
