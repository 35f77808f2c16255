"""One job in a simulated world: members, a coordinator, a network, and chance, all of it drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from simulation.checks import Checks
from simulation.clock import Clock
from simulation.coordinator import Coordinator
from simulation.member import Member
from simulation.network import COORDINATOR, Network
from simulation.rounds import Rounds
from simulation.shares import is_all

from paceline.checkpoint.tag import Tag
from paceline_server.events import ExitReported
from paceline_server.model import JobSettings

__all__ = ["Shape", "World"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What kind of schedules to draw.

    Attributes:
        members: how many start; a range to draw from.
        steps: how many steps the job has; a range.
        faults: how many faults strike; a range.
        closed: how often a failed step ends in a meeting that lets no newcomer in.
        loses_disk: the coordinator's disk may be lost.
        node_size: so many members hold one copy of the state between them, 0 for all.
        hosts: so many hosts there are, which share memory and die as one; 0 if each member has its own.
        away: what strikes are notices to leave, and a coordinator that is away for longer than members wait for it.
    """

    members: tuple[int, int] = (3, 4)
    steps: tuple[int, int] = (4, 6)
    faults: tuple[int, int] = (1, 5)
    closed: float = 0.05
    loses_disk: bool = False
    node_size: int = 1
    hosts: int = 0
    away: bool = False


class World:
    """Everything.

    Args:
        seed: of all chance.
        shape: what to draw.

    Attributes:
        members: every process that ever was.
        by_id: who has, or had, a session.
        restless_until: the last fault has ended by then.
    """

    def __init__(self, seed: int, shape: Shape) -> None:
        self.seed, self.shape = seed, shape
        self.rng = random.Random(seed)
        self._chance = self.rng.random
        self.clock = Clock()
        self.trace: list[tuple[float, str, str]] = []
        self.network = Network(self)
        self.rounds = Rounds(self)
        self.checks = Checks(self, strict=not shape.loses_disk)
        self.members: list[Member] = []
        self.by_id: dict[str, Member] = {}
        self.checkpoint: tuple[Tag, tuple[object, ...]] = (Tag(0, 0), ())
        self.restless_until = 0.0
        self._numbers = 0
        self._waiting_for: dict[str, list[list[object]]] = {}
        self._pace = self.rng.choice((0.03, 0.1, 0.4))
        self.last_step = self.rng.randint(*shape.steps)
        self.most = self.rng.randint(*shape.members)
        least = self.rng.randint(1, 2)
        self.settings = JobSettings(least, self.most + 1, 3.0)
        self.coordinator = Coordinator(self)
        for _ in range(self.most):
            self.clock.after(self.delay(0.0, 0.2), self.spawn)

    # Chance -----------------------------------------------------------------------------------------------------------

    def delay(self, least: float, most: float) -> float:
        """Some seconds."""
        return least + (most - least) * self._chance()

    def latency(self) -> float:
        """What a message takes: a millisecond or so, now and then far more."""
        chance = self._chance()
        return 0.0005 + 0.004 * chance if chance < 0.9 else 4.0 * (chance - 0.9)

    def compute(self) -> float:
        """What a member computes between two words."""
        return self._pace * self._chance()

    def number(self) -> int:
        """One that nothing else has."""
        self._numbers += 1
        return self._numbers

    def note(self, who: str, what: str) -> None:
        """A line of the trace."""
        self.trace.append((self.clock.now, who, what))

    # Moments that faults wait for -------------------------------------------------------------------------------------

    def when(self, moment: str, count: int, action: Callable[[], None]) -> None:
        """Has something done at the so-manyth moment of a kind."""
        self._waiting_for.setdefault(moment, []).append([count, action])

    def moment(self, kind: str) -> None:
        """A moment that faults may wait for has come."""
        waiting = self._waiting_for.get(kind)
        if not waiting:
            return
        for entry in list(waiting):
            entry[0] -= 1  # type: ignore[operator]
            if entry[0] == 0:
                waiting.remove(entry)
                self.clock.after(self.delay(0.0, 0.01), entry[1])  # type: ignore[arg-type]

    # Processes --------------------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """A worker process starts."""
        if self.checks.finished is not None and not self.living():
            return
        name = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[len(self.members) % 26] + str(len(self.members) // 26 or "")
        held, bits = self.checkpoint
        self.note(name, f"starts with {tuple(held)}")
        self.members.append(Member(self, name, 1000 + len(self.members), held, bits))

    def living(self) -> list[Member]:
        """The processes that run, or are frozen."""
        return [member for member in self.members if member.alive]

    def dismissed(self, member: Member, last: bool) -> None:
        """A member may go: the last ones have written a checkpoint; of a spread state, if they could do so together."""
        self.checks.dismissed(member, last=last)
        together = self.shape.node_size == 1 or not (member.void or member.place.stored)
        if last and member.place.held is not None and together:
            self.checkpoint = max(self.checkpoint, (member.place.held, member.bits))

    def committed(self, tag: Tag, bits: tuple[object, ...]) -> None:
        """A state is committed: now and then its checkpoint is due, and is published."""
        if self.shape.node_size != 1 and self.rng.random() < 0.4:
            self.note("disk", f"has the checkpoint {tuple(tag)}")
            self.checkpoint = max(self.checkpoint, (tag, bits))

    def has_all(self, tag: Tag, members: list[Member]) -> bool:
        """True if members hold all of a state between them."""
        return is_all([share for member in members for share in member.could_give(tag)])

    def kill(self, member: Member, *, seen: bool) -> None:
        """A process dies; a launcher may have seen it."""
        self.note(member.name, f"is killed{', its launcher sees it' if seen else ''}")
        member.end()
        self.gone(member)
        if seen:
            self.clock.after(self.delay(0.001, 0.05), self._report_exit, member)

    def _report_exit(self, member: Member) -> None:
        if self.coordinator.up and self.network.reaches(member.name, COORDINATOR):
            self.coordinator.receive(None, ExitReported(member.process, -9))
        else:
            self.clock.after(0.5, self._report_exit, member)

    def gone(self, member: Member) -> None:
        """A process has ended: whoever has a link to it sees that end."""
        for peer in self.living():
            view = peer.view
            for seat in view.seats if view is not None else ():
                if seat.member_id == member.asked_id and self.network.reaches(member.name, peer.name):
                    peer.later(self.delay(0.001, 0.05), peer.link_ended, view, seat.rank)
        if self.checks.finished is None:
            self.clock.after(self.delay(0.1, 3.0), self._replace)

    def _replace(self) -> None:
        if self.checks.finished is None and len(self.living()) < max(self.most, self.settings.min_workers):
            self.spawn()
