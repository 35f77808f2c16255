"""One schedule from its seed to its end: finished, or broken with a trace that can be replayed.

When the faults have stopped, the job must finish in bounded time. If all who held its state have died unseen, the
coordinator must say so, and an operator, who knows that they are dead, gets it going again.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulation.broken import Broken
from simulation.faults import plan
from simulation.world import Shape, World

from paceline.checkpoint.tag import Tag
from paceline_server.events import RestartAsked

__all__ = ["Outcome", "replay", "run"]

_PATIENCE = 40.0
"""Seconds after the last fault, or the operator's word, in which the job must finish."""

_LOOK = 12.0
"""Seconds after the last fault at which an operator looks whether the job waits for the dead."""


_MOST_EVENTS = 20_000
"""No schedule takes a tenth of it unless something spins."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule went."""

    generations: int
    events: int
    restarts: int


def run(seed: int, shape: Shape | None = None) -> Outcome:
    """Runs one schedule.

    Raises:
        Broken: an invariant does not hold; the text has the seed and the events.
    """
    world = World(seed, shape or Shape())
    plan(world)
    try:
        return _to_its_end(world)
    except Exception as error:
        lines = "\n".join(f"  {time:9.4f} {who:>3} {what}" for time, who, what in world.trace)
        shown = f"{error}" if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        raise Broken(f"{shown}\nseed={seed} shape={world.shape}\n{lines}") from error


def replay(seed: int, shape: Shape | None = None) -> None:
    """Prints a schedule, for looking at."""
    world = World(seed, shape or Shape())
    plan(world)
    try:
        _to_its_end(world)
    finally:
        for time, who, what in world.trace:
            print(f"  {time:9.4f} {who:>3} {what}")  # noqa: T201


def _to_its_end(world: World) -> Outcome:
    events = restarts = hired = 0
    looked_at = give_up_at = 0.0
    while not (world.checks.finished is not None and not world.living()):
        if not world.clock.advance():
            raise Broken("nothing is left to happen")
        events += 1
        if events > _MOST_EVENTS:
            raise Broken("liveness: it goes round in circles")
        now = world.clock.now
        quiet_from = max(world.restless_until, looked_at)
        give_up_at = quiet_from + _PATIENCE
        if now > quiet_from + _LOOK and world.coordinator.up and "paceline restart" in world.coordinator.reason:
            if world.checks.finished is not None and not world.checks.promised:
                break  # all have finished, and gone with nobody to tell
            _check_that_all_are_dead(world)
            world.note("ops", f"restart, for: {world.coordinator.reason}")
            world.coordinator.receive(None, RestartAsked())
            restarts, looked_at = restarts + 1, now
        if now > quiet_from + _LOOK and "more worker" in world.coordinator.reason and hired < 3:
            world.note("ops", f"brings a worker, for: {world.coordinator.reason}")
            world.spawn()
            hired, looked_at = hired + 1, now
        if now > give_up_at or restarts > 3:
            left = ", ".join(f"{m.name} {m.place.phase.value} g{m.place.generation}" for m in world.living())
            raise Broken(f"liveness: the job does not finish: {world.coordinator.reason} ({left})")
    return Outcome(world.coordinator.membership.state.generation, events, restarts)


def _check_that_all_are_dead(world: World) -> None:
    """An operator may say that the members of the last view are dead if none of them can go on."""
    view = world.coordinator.membership.state.view
    assert view is not None
    if world.checks.promised:
        raise Broken("I1: the line was finished, and its last generation is waited for")
    members = [(seat, world.by_id[seat.member_id]) for seat in view.seats]
    members = [(seat, member) for seat, member in members if member.alive and member.member_id == seat.member_id]
    latest = max((member.place.held for _, member in members if member.place.held is not None), default=None)
    for seat, member in members:
        place = member.place
        if world.shape.node_size != 1 and place.held != latest:
            continue  # others have gone further, with those who are dead: that may be committed
        base = view.base
        ahead = place.holds_base and place.held is not None and base is not None and place.held > base
        whole = place.held is not None and world.has_all(place.held, world.living())
        if world.shape.node_size != 1 and place.held == Tag(0, 0):
            continue  # what others built for themselves has the same tag
        if whole and (seat.rank not in view.newcomers or ahead):
            raise Broken(f"liveness: {member.name} holds the state of the last generation, and it does not go on")
