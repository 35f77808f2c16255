"""One schedule from its seed to its end: finished, or broken with a trace that can be replayed.

When the faults have stopped, the job must finish in bounded time. If all who held its state have died unseen, the
coordinator must say so, and an operator, who knows that they are dead, gets it going again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from simulation.broken import Broken
from simulation.faults import plan
from simulation.lane_checks import LaneChecks
from simulation.process import Process
from simulation.standins import installed
from simulation.world import Shape, World

from paceline_protocol import Tag
from paceline_protocol._launches import LONGEST_S
from paceline_protocol.coordinator import RestartAsked

__all__ = ["Outcome", "replay", "run"]

_PATIENCE = 40.0
"""Seconds after the last fault, or the operator's word, in which the job must finish."""

_LOOK = 12.0
"""Seconds after the last fault at which an operator looks whether the job waits for the dead."""

_MOST_EVENTS = 100_000
"""No schedule takes a tenth of it unless something spins."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule went."""

    generations: int
    events: int
    restarts: int
    repairs: int
    unequal: int


def run(seed: int, shape: Shape | None = None) -> Outcome:
    """Runs one schedule.

    Raises:
        Broken: an invariant does not hold; the text has the seed and the events.
    """
    world = World(seed, shape or Shape())
    try:
        return _run(world)
    except Exception as error:
        lines = "\n".join(f"  {time:9.4f} {who:>3} {what}" for time, who, what in world.trace)
        shown = f"{error}" if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        raise Broken(f"{shown}\nseed={seed} shape={world.shape}\n{lines}") from error


def replay(seed: int, shape: Shape | None = None) -> None:
    """Prints a schedule with what the real code logs, for looking at."""
    world = World(seed, shape or Shape())
    world.tells = True
    handler = _Noting(world)
    logging.root.addHandler(handler)
    before, logging.root.level = logging.root.level, logging.INFO
    try:
        _run(world)
    finally:
        logging.root.removeHandler(handler)
        logging.root.level = before
        for time, who, what in world.trace:
            print(f"  {time:9.4f} {who:>3} {what}")  # noqa: T201


class _Noting(logging.Handler):
    """Puts what is logged into the trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note("log", record.getMessage())


def _run(world: World) -> Outcome:
    with installed(world):
        try:
            plan(world)
            world.begin()
            return _to_its_end(world)
        finally:
            world.end()


def _to_its_end(world: World) -> Outcome:
    events = restarts = hired = 0
    looked_at = give_up_at = 0.0
    while not (world.checks.finished is not None and not [m for m in world.living() if not m.hangs]):
        if not world.clock.advance():
            raise Broken("nothing is left to happen")
        if world.checks.broken is not None:
            raise world.checks.broken
        events += 1
        if events > _MOST_EVENTS:
            raise Broken("liveness: it goes round in circles")
        now = world.clock.now
        quiet_from = max(world.restless_until, looked_at)
        give_up_at = quiet_from + _PATIENCE + (LONGEST_S if world.shape.launched else 0.0)
        if now <= quiet_from + _LOOK:
            continue
        reason = world.coordinator.reason
        if world.coordinator.up and "paceline restart" in reason:
            if world.checks.finished is not None and not world.checks.promised:
                break  # all have finished, and gone with nobody to tell
            _check_that_all_are_dead(world)
            world.note("ops", f"restart, for: {reason}")
            world.coordinator.tell(RestartAsked())
            if isinstance(world.checks, LaneChecks):
                world.checks.declared = True
            restarts, looked_at = restarts + 1, now
        if ("more worker" in reason or "more replica" in reason) and hired < 6 and not _has_enough(world):
            world.note("ops", f"brings a worker, for: {reason}")
            world.spawn()
            hired, looked_at = hired + 1, now
        if hanging := _waited_for(world):
            _check_that_nobody_can_go_on(world)
            world.note("ops", f"ends those that hang, for: {reason}")
            for member in hanging:
                world.kill(member, seen=True)
            looked_at = now
        if now > give_up_at or restarts > 3:
            left = ", ".join(f"{m.name} {m.place and m.place.phase.value}" for m in world.living())
            raise Broken(f"liveness: the job does not finish: {reason} ({left})")
    membership = world.coordinator.membership
    assert membership is not None
    return Outcome(membership.state.generation, events, restarts, world.repairs, world.unequal)


def _has_enough(world: World) -> bool:
    """True if the workers that are there suffice: then none of them may be left out for long."""
    node = max(1, world.shape.node_size)
    needed = -(-world.settings.min_workers // node) * node
    staying = [m for m in world.living() if not m.hangs and not (m.place is not None and m.place.leaving)]
    if world.shape.replica_size > 1:
        return sum(all(rank in staying for rank in replica.ranks) for replica in world.replicas) >= needed
    return len(staying) >= needed


def _waited_for(world: World) -> list[Process]:
    """Members of the last view that hang, for ever, and former ones if a state is not whole without them."""
    membership = world.coordinator.membership
    if membership is None or membership.state.view is None:
        return []
    sessions = membership.state.present()
    if "end its process" in world.coordinator.reason:
        sessions += membership.state.returning()
    members = [world.by_id[session.member_id] for session in sessions]
    return [member for member in members if member.alive and member.hangs]


def _check_that_nobody_can_go_on(world: World) -> None:
    """A worker that hangs may be waited for if nobody else has the state of the line."""
    membership = world.coordinator.membership
    view = membership.state.view if membership is not None else None
    for seat in view.seats if view is not None and view.base is not None else ():
        member = world.by_id[seat.member_id]
        place = member.place
        if member.hangs or place is None or not member.answers_as(seat.member_id) or not place.holds_base:
            continue
        if place.held is None or world.shape.node_size != 1:
            continue
        if seat.rank not in view.newcomers or place.held > view.base:  # type: ignore[union-attr]
            raise Broken(f"liveness: {member.name} can go on, and another member that hangs is waited for")


def _is_seen(world: World, dead: Process) -> bool:
    """True if a worker runs that sees that another one has ended."""
    seeing = (other for other in world.living() if other.process.sight == dead.process.sight and not other.hangs)
    return any(other.member_id for other in seeing)


def _check_that_all_are_dead(world: World) -> None:
    """An operator may say that the members of the last view are dead if none of them can go on."""
    membership = world.coordinator.membership
    assert membership is not None
    view = membership.state.view
    assert view is not None
    if world.checks.promised:
        raise Broken("I1: the line was finished, and its last generation is waited for")
    members = [(seat, world.by_id[seat.member_id]) for seat in view.seats]
    unseen = [member for _, member in members if not member.alive and not _is_seen(world, member)]
    if not unseen and not any(member.alive for _, member in members):
        raise Broken("liveness: workers on their hosts see that all members have ended, and an operator has to say so")
    members = [(seat, member) for seat, member in members if member.answers_as(seat.member_id) and not member.hangs]
    there = [member for _, member in members]
    latest = max((member.held for _, member in members if member.held is not None), default=None)
    for seat, member in members:
        place = member.place
        if place is None or (world.shape.node_size != 1 and place.held != latest):
            continue  # others have gone further, with those who are dead: that may be committed
        base = view.base
        ahead = place.holds_base and place.held is not None and base is not None and place.held > base
        if member.is_rank and not all(mate in there and mate.held == place.held for mate in member.replica.ranks):
            continue  # its replica has lost a rank, or its ranks hold two states
        whole = place.held is not None and world.has_all(place.held, world.living())
        if world.shape.node_size != 1 and place.held == Tag(0, 0):
            continue  # what others built for themselves has the same tag
        if whole and (seat.rank not in view.newcomers or ahead):
            raise Broken(f"liveness: {member.name} holds the state of the last generation, and it does not go on")
