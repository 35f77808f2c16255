"""What goes wrong, and when: drawn from the seed before the run, so that it is the same in each replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.network import COORDINATOR

from paceline_server.events import DrainAsked

if TYPE_CHECKING:
    from simulation.member import Member
    from simulation.world import World

__all__ = ["plan"]

_MOMENTS = ("view", "store", "round", "round", "meet", "planned")
_MORE_MOMENTS = (*_MOMENTS, "second word", "second word", "take")


class _Faults:
    """The faults of one world; each is a method that says for how long it lasts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.kinds: list[tuple[int, Callable[[], float]]] = [
            (5, self.kill),
            (3, self.freeze),
            (3, self.reset_streams),
            (4, self.restart_coordinator),
            (2, self.stall_coordinator),
            (3, self.cut_members),
            (4, self.cut_coordinator),
            (2, self.cut_old_from_coordinator),
            (2, self.cut_one),
            (2, self.drain),
            (1, self.raise_error),
            (1, self.spoil),
            (3, self.join),
        ]
        if world.shape.loses_disk:
            self.kinds.append((4, self.lose_disk))

    def one(self) -> Member | None:
        living = self.world.living()
        return self.rng.choice(living) if living else None

    def some(self) -> list[Member]:
        living = self.world.living()
        return self.rng.sample(living, self.rng.randint(1, len(living))) if living else []

    def short_or_long(self) -> float:
        return self.world.delay(0.05, 2.5) if self.rng.random() < 0.5 else self.world.delay(3.1, 7.0)

    def kill(self) -> float:
        seen = self.rng.random() < 0.6
        victims = self.some() if self.rng.random() < 0.15 else [self.one()]
        if self.world.shape.hosts and self.rng.random() < 0.3:  # whole hosts die
            nodes = {member.process.node for member in victims if member is not None}
            victims = [member for member in self.world.living() if member.process.node in nodes]
        for member in victims:
            if member is not None:
                self.world.kill(member, seen=seen)
        return 3.0

    def freeze(self) -> float:
        seconds = self.short_or_long()
        for member in self.some() if self.rng.random() < 0.3 else [self.one()]:
            if member is not None:
                member.freeze(seconds)
        return seconds

    def reset_streams(self) -> float:
        for member in self.some():
            self.world.note(member.name, "loses its stream")
            if member.stream is not None:
                member.stream.reset()
        return 1.0

    def restart_coordinator(self) -> float:
        coordinator = self.world.coordinator
        if not coordinator.up:
            return 0.0
        seconds = self.world.delay(0.01, 1.0) if self.rng.random() < 0.6 else self.world.delay(1.0, 6.0)
        coordinator.crash()
        self.world.clock.after(seconds, coordinator.start)
        return seconds

    def lose_disk(self) -> float:
        if self.world.coordinator.up:
            self.world.note(COORDINATOR, "loses its disk")
            self.world.coordinator.disk.lose()
        return self.restart_coordinator()

    def stall_coordinator(self) -> float:
        seconds = self.short_or_long()
        self.world.coordinator.stall(seconds)
        return seconds

    def cut_members(self) -> float:
        """A partition among members: the coordinator is on one side, or on none."""
        side = {member.name for member in self.some()}
        others = [member.name for member in self.world.living() if member.name not in side]
        return self.cut(list(itertools.product(sorted(side), others)))

    def cut_coordinator(self) -> float:
        pairs = [(member.name, COORDINATOR) for member in self.some()]
        return self.cut(pairs)

    def cut_old_from_coordinator(self) -> float:
        """Only newcomers reach the coordinator."""
        return self.cut([(m.name, COORDINATOR) for m in self.world.living() if m.place.generation])

    def cut_one(self) -> float:
        member = self.one()
        if member is None:
            return 0.0
        others = [other.name for other in self.world.living() if other is not member]
        return self.cut([(member.name, other) for other in [*others, COORDINATOR]])

    def cut(self, pairs: list[tuple[str, str]]) -> float:
        if not pairs:
            return 0.0
        seconds = self.short_or_long()
        self.world.note("net", f"{' '.join('-'.join(pair) for pair in pairs)} cut for {seconds:.2f} s")
        self.world.network.cut(pairs, seconds)
        for name, other in pairs:
            if other == COORDINATOR and self.rng.random() < 0.8:
                self.world.clock.after(self.world.delay(0.0, min(1.0, seconds)), self._lose_stream, name)
        return seconds

    def _lose_stream(self, name: str) -> None:
        for member in self.world.living():
            if member.name == name and member.stream is not None:
                member.stream.reset()

    def drain(self) -> float:
        members = [member.member_id for member in self.some() if member.member_id]
        if members and self.world.coordinator.up:
            if self.rng.random() < 0.8:
                members = members[:1]
            self.world.note(COORDINATOR, f"drains {', '.join(self.world.by_id[each].name for each in members)}")
            self.world.coordinator.receive(None, DrainAsked(tuple(members), "scale down"))
            for _ in members:
                self.world.clock.after(self.world.delay(0.1, 3.0), self.world.spawn)
        return 3.0

    def raise_error(self) -> float:
        member = self.one()
        if member is not None:
            member.hear(member.raise_error)
        return 3.0

    def spoil(self) -> float:
        member = self.one()
        if member is not None:
            member.spoil_next = True
        return 1.0

    def leave_alone(self) -> float:
        """The coordinator is away for longer than members wait for it."""
        if self.rng.random() < 0.4:
            return self.cut([(member.name, COORDINATOR) for member in self.world.living()])
        coordinator = self.world.coordinator
        if coordinator.up:
            coordinator.crash()
            self.world.clock.after(self.world.delay(3.5, 6.0), coordinator.start)
        return 6.0

    def join(self) -> float:
        if self.world.checks.finished is None:
            self.world.spawn()
        return 1.0

    def strike(self, fault: Callable[[], float]) -> None:
        if self.world.checks.finished is None:
            self.world.restless_until = max(self.world.restless_until, self.world.clock.now + fault())


def plan(world: World) -> None:
    """Draws the faults of a run."""
    faults = _Faults(world)
    weights = [weight for weight, _ in faults.kinds]
    rng = world.rng
    if world.shape.away:
        for _ in range(3):
            world.clock.after(world.delay(0.5, 3.0), faults.strike, faults.drain)
        for _ in range(4):
            moment = rng.choice(("planned", "store", "view", "meet", "take"))
            world.when(moment, rng.randint(1, 6), lambda: faults.strike(faults.leave_alone))
        return
    for _ in range(rng.randint(*world.shape.faults)):
        _, fault = rng.choices(faults.kinds, weights)[0]
        if rng.random() < 0.5:
            world.clock.after(world.delay(0.0, 4.0), faults.strike, fault)
        else:
            world.when(
                rng.choice(_MOMENTS if world.shape.node_size == 1 else _MORE_MOMENTS),
                rng.randint(1, 9),
                lambda fault=fault: faults.strike(fault),
            )  # type: ignore[misc]
