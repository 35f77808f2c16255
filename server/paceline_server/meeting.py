"""How a line goes on from one generation to the next (I2). Pure: a function of the job's state.

When a generation is over, its members *meet*: each says which state it holds. The rules:

- A member *leads* if it holds the base of the generation that is over, or what came of it since. The next base is the
  greatest tag among those who lead; nobody else counts, however great its tag: a zombie's may be another line's.
- Everyone of the old generation takes the base inside the meeting, before the next view forms: so the death of whoever
  gives it only repeats the meeting.
- Newcomers are seated behind, and take the base when the view has formed. They speak for the line once a step was
  applied there; before, only if one of those who gave them the base does.
- Nobody leads, and all who might are known to have ended: the line is over. Else the others wait for them.

A view without a base is one whose members have yet to compare what they brought: there everybody leads.

Source: the interleavings in DESIGN.md 13, each of which is a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline_server.model import JobState, Met, Seat, Session, Tag, View

__all__ = ["Meeting", "convene", "way_out"]


_NAMED = 8
"""So many members are listed; a sentence is for people."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What is to be done about the members of a generation that is over.

    Attributes:
        reason: why, in a sentence.
        members: who forms the next view, in rank order; empty while none is to form.
        base: the state that the next view starts from.
        newcomers: ranks among `members` that do not hold it.
        manifest: of the line.
        laggards: who is to take the base before anything else happens.
        misfits: whose manifest differs from the line's.
        donors: who holds the base.
        dismissed: who may go; at once if no view forms, else with the next view.
        over: the line is over; whoever holds a state of any kind may begin a new one.
    """

    reason: str
    members: tuple[Session, ...] = ()
    base: Tag | None = None
    newcomers: tuple[int, ...] = ()
    manifest: bytes = b""
    laggards: tuple[Session, ...] = ()
    misfits: tuple[Session, ...] = ()
    donors: tuple[Session, ...] = ()
    dismissed: tuple[Session, ...] = ()
    over: bool = False


def convene(state: JobState) -> Meeting:
    """Decides about the generation after `state.view`, of which some member has met, or of which all have gone.

    Args:
        state: the job.
    """
    view = state.view
    assert view is not None, "a meeting is of a view's members"
    present = state.present()
    late = [session for session in present if not session.has_met]
    if late:
        return Meeting(f"generation {view.generation} is over; waiting for {_names(view, late)} to stop")
    leaders = [session for session in present if _leads(view, session)]
    if not leaders or not _may_speak(view, leaders):
        return _without_leader(state, view, present)
    base = max(_met(session).tag or Tag(0, 0) for session in leaders)
    first = next(session for session in leaders if _met(session).tag == base)
    manifest = view.manifest or _met(first).manifest
    misfits = tuple(session for session in [*present, *state.ready()] if _met(session).manifest != manifest)
    donors = tuple(session for session in leaders if _met(session).state == _met(first).state)
    laggards = tuple(s for s in present if s not in donors and s not in misfits and not _met(s).leaving)
    meeting = Meeting("", base=base, manifest=manifest, laggards=laggards, misfits=misfits, donors=donors)
    odd = [session for session in present if session in misfits]
    if odd:
        return _with(meeting, f"waiting for {_names(view, odd)} to leave: what it trains differs from the others'")
    if laggards:
        return _with(meeting, f"waiting for {_names(view, laggards)} to take the state of step {base.step}")
    return _seat(state, view, present, meeting)


def way_out(state: JobState, silent: Sequence[Seat]) -> str:
    """Who is silent, and what an operator can do about it.

    Args:
        state: the job.
        silent: who may hold the line's state and is not heard of.
    """
    names = ", ".join(seat.label for seat in silent)
    is_are, it_has = ("is", "it has") if len(silent) == 1 else ("are", "they have")
    known = f"if you know that {it_has} ended: paceline restart {state.name}"
    return f"{names} {is_are} silent and may hold its state; {known}"


def _seat(state: JobState, view: View, present: Sequence[Session], meeting: Meeting) -> Meeting:
    """Everyone of the old generation holds the base: who is in the next one?"""
    closed = any(_met(session).closed for session in present)
    ready = [] if closed else [session for session in state.ready() if session not in meeting.misfits]
    staying = [session for session in present if not _met(session).leaving]
    if not staying and ready:
        staying = list(meeting.donors)  # somebody must hold the base then: they leave at the step after
    if not staying:
        text = f"all members of generation {view.generation} have left"
        return _with(meeting, text, dismissed=tuple(present))
    least, most = view.settings.min_workers, view.settings.max_workers
    incoming = _incoming(view, staying, ready, most)
    count, needed = len(staying) + len(incoming), most if view.explicit else least
    if closed and not view.explicit:
        needed = 1  # nobody may come in before those who are left have done what they are about
    if count < needed:
        lacking = needed - count
        why = f" ({state.verdict.text})" if state.verdict is not None else ""
        text = f"waiting for {lacking} more worker{'s'[: lacking != 1]} ({count} of at least {needed}){why}"
        # Who stays holds the base by now, and a notice to leave does not wait.
        return _with(meeting, text, dismissed=tuple(session for session in present if session not in staying))
    members = staying + incoming
    if view.explicit:
        members.sort(key=lambda session: session.claimed_rank or 0)
    newcomers = tuple(rank for rank, session in enumerate(members) if session in incoming)
    leaving = tuple(session for session in present if session not in staying)
    text = f"{len(staying)} member{'s'[: len(staying) != 1]} of generation {view.generation} go on"
    if incoming:
        text += f" with {len(incoming)} newcomer{'s'[: len(incoming) != 1]}"
    return _with(meeting, text, members=tuple(members), newcomers=newcomers, dismissed=leaving)


def _incoming(view: View, staying: Sequence[Session], ready: Sequence[Session], most: int) -> list[Session]:
    if not view.explicit:
        return list(ready[: most - len(staying)])
    taken = {session.claimed_rank for session in staying}
    by_rank = {session.claimed_rank: session for session in reversed(ready) if session.claimed_rank not in taken}
    return list(by_rank.values())


def _without_leader(state: JobState, view: View, present: Sequence[Session]) -> Meeting:
    """Nobody here holds the line's state. Whoever does may still be running, unless it is known to have ended."""
    silent = [view.seats[rank] for rank, ending in sorted(state.endings.items()) if not ending.sure]
    if silent:
        return Meeting(f"generation {view.generation} cannot go on: {way_out(state, silent)}")
    taking = [session for session in present if session.catching_up]
    if taking:
        return Meeting(f"waiting for {_names(view, taking)} to say if the state of the line was taken in time")
    text = f"all who held the state of generation {view.generation} have ended: a new line begins"
    return Meeting(text, over=True)


def _leads(view: View, session: Session) -> bool:
    met = _met(session)
    return met.tag is not None and (met.holds_base or view.base is None)


def _may_speak(view: View, leaders: Sequence[Session]) -> bool:
    """False if newcomers alone hold the base: whoever gave it to them may have gone on without them.

    A newcomer takes the base from members that may not have heard of the new generation yet. If those lose the
    coordinator for long they go on in the old one, and commit. Not so once a step was applied in the new generation:
    all of it had to be there. What newcomers hold is not lost: they bring it to a new line, as do all who come back.
    """
    return view.base is None or any(s.rank not in view.newcomers or _met(s).tag != view.base for s in leaders)


def _met(session: Session) -> Met:
    assert session.met is not None
    return session.met


def _names(view: View, sessions: Sequence[Session]) -> str:
    named = [view.seats[s.rank].short_label if s.rank is not None else s.process.host for s in sessions[:_NAMED]]
    more = len(sessions) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _with(meeting: Meeting, reason: str, **changes: object) -> Meeting:
    return replace(meeting, reason=reason, **changes)  # type: ignore[arg-type]
