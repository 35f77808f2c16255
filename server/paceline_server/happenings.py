"""The sentences of a job's events, of bounded length. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline_protocol import Seat, View, rank_name
from paceline_protocol.coordinator import (
    AddressRefused,
    DrainAsked,
    Event,
    ExitReported,
    JobState,
    Registered,
    RestartAsked,
    Session,
)

_NAMED = 3
"""Members that an event names; of more it says how many."""

_MOST_CHARACTERS = 300
"""The most characters of an event's sentence."""


@dataclass(frozen=True, slots=True)
class Happening:
    """Something worth an event."""

    kind: str
    generation: int
    text: str


def of_orders(event: Event, state: JobState) -> list[Happening]:
    """Says which order an operator or a policy has given."""
    generation = state.view.generation if state.view is not None else state.generation
    match event:
        case DrainAsked(member_ids, why):
            sessions = [session for id_ in member_ids if (session := state.sessions.get(id_)) is not None]
            names = ", ".join(map(label, sessions[:_NAMED])) if len(sessions) <= _NAMED else f"{len(sessions)} members"
            text = f"{names or 'nobody'} {'is' if len(sessions) < 2 else 'are'} to leave: {why}"
            return [Happening("drained", generation, cut(text))]
        case RestartAsked():
            return [Happening("restarted", generation, "the job is started anew: its last members are taken for dead")]
    return []


def how_it_went(event: Event) -> str:
    """How a session has ended of which no ending is stored, because it had no seat in the last view."""
    match event:
        case ExitReported():
            return event.how
        case AddressRefused():
            return "died: nobody listens at its address"
        case Registered():
            return "came back as a new member"
    return "was silent for too long"


def label(session: Session) -> str:
    """Names a member by its last rank, host and pid."""
    process = session.process
    size = session.settings.replica_size
    name = rank_name(session.rank, size) if session.rank is not None else "a worker"
    return f"{name} ({process.host}, pid {process.pid})"


def named(seats: Sequence[Seat], *, short: bool = False) -> str:
    """Names members, or says how many they are; `short` leaves their pids out."""
    if len(seats) > _NAMED:
        return f"{len(seats)} workers"
    return ", ".join(seat.short_label if short else seat.label for seat in seats)


def how_it_began(view: View, why: Sequence[str]) -> str:
    """Says that a generation has begun; `why` names the members that have come and those that have left."""
    count = len(view.seats)
    start = f" from step {view.base.step}" if view.base is not None else ""
    because = f": {' and '.join(why)}" if why else ""
    return f"generation {view.generation} has begun{start} with {count} worker{'s' if count != 1 else ''}{because}"


def cut(text: str) -> str:
    """Returns the beginning of a sentence that is too long for an event."""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
