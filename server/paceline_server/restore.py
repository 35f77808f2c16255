"""From what was stored to a job that goes on. Pure.

Members of the stored view are members again, without a stream; each proves itself by `resume` and its token. What was
not stored is forgotten: candidates (they register anew) and barriers in progress (members enter them again).
"""

from __future__ import annotations

from paceline_server.model import JobState, Session, Standing
from paceline_server.storage.base import StoredJob

__all__ = ["restore"]


def restore(now: float, stored: StoredJob) -> JobState:
    """The state of a stored job after a restart.

    Args:
        now: the time, in seconds; nothing before it counts as silence.
        stored: the job.
    """
    state = JobState(stored.name, generation=stored.generation, finished=stored.finished, reached=stored.reached)
    state.last_arrival = state.restored_at = now
    view = stored.view
    if view is None:
        return state
    if len(stored.endings) == len(view.seats):
        over = view.base is None or all(e.sure for e in stored.endings.values())
        if not over:
            state.view, state.verdict, state.endings, state.restored = view, stored.verdict, dict(stored.endings), True
        return state
    state.view, state.verdict, state.endings, state.restored = view, stored.verdict, dict(stored.endings), True
    for seat in view.seats:
        if seat.rank in stored.endings:
            continue
        state.sessions[seat.member_id] = Session(
            member_id=seat.member_id,
            token_sha256=seat.token_sha256,
            process=seat.process,
            address=seat.address,
            settings=view.settings,
            claimed_rank=seat.rank if view.explicit else None,
            generation_floor=0,
            arrival=seat.arrival,
            stream=None,
            heard=now,
            # A ring goes on without its coordinator: members of a live view are not silent because they were not here.
            lease_from=None if stored.verdict is None else now,
            standing=Standing.IN_VIEW if stored.verdict is None else Standing.VOID,
            generation=view.generation,
            last_generation=view.generation,
            rank=seat.rank,
            verdict=stored.verdict,
        )
    return state
