"""Generations that are over, as `paceline_protocol.convene` finds them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_protocol import OURS, Ending, JobSettings, Meet, Process, Seat, Tag, View
from paceline_protocol.coordinator import JobState, Session, Standing

__all__ = ["BASE", "SILENT", "SURE", "job", "names"]

BASE = Tag(6, 4)
SURE = Ending("was killed by SIGKILL", orderly=False)
SILENT = Ending("was silent for 3.0 s", orderly=False, sure=False)


def job(
    members: Sequence[Meet | Ending | None],
    *,
    newcomers: tuple[int, ...] = (),
    base: Tag | None = BASE,
    ready: int = 0,
    least: int = 1,
) -> JobState:
    """Generation 7 with members that have met, have gone, or (None) have yet to stop; and candidates that are ready."""
    settings = JobSettings(least, 9, 3.0)
    seats = tuple(
        Seat(rank, f"m{rank}", Process(f"host-{rank}", 1), "", b"", rank) for rank in range(len(members) + ready)
    )
    state = JobState("job", generation=7)
    state.view = View(7, settings, False, seats[: len(members)], OURS, base, newcomers)
    for seat, what in zip(seats, [*members, *[Meet(0, Tag(0, 0), False)] * ready], strict=True):
        if isinstance(what, Ending):
            state.endings[seat.rank] = what
            continue
        of_view = seat.rank < len(members)
        state.sessions[seat.member_id] = Session(
            seat.member_id, b"", seat.process, "", settings, None, 0, seat.rank, 1, 0.0, 0.0, OURS,
            standing=Standing.IN_VIEW if of_view else Standing.CANDIDATE,
            generation=7 if of_view else 0,
            last_generation=7 if of_view else 0,
            rank=seat.rank if of_view else None,
            met=what,
        )  # fmt: skip
    return state


def names(sessions: tuple[Session, ...]) -> str:
    return " ".join(session.member_id for session in sessions)
