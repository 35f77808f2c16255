"""Decides when a view forms, of which workers, or why none forms yet.

The first view of a line forms of candidates; that is decided here. `_meeting` decides about the others, which form of
the members of the one before.

A decision always has a sentence, which is told to waiting workers, logged, and shown by `paceline status`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline_protocol._job_state import JobState, Session
from paceline_protocol._meeting import Meeting, convene, way_out
from paceline_protocol._replicas import apart, noun, whole
from paceline_protocol._seating import by_host
from paceline_protocol._values import JobSettings, Tag, View
from paceline_protocol._versions import OURS

_NAMED = 8
"""Most missing ranks, and members, that are listed: the sentence is for people."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the policy, and a sentence that says why.

    `members` has the members of the view that forms, in rank order; None if none forms. `again_at` is when time alone
    may change the decision; None if only an event can. If `summon`, a member of the live view must ask the others to
    meet, because candidates are ready. `meeting` is what the members of the last view must do, if that view is over.
    """

    members: tuple[Session, ...] | None
    reason: str
    again_at: float | None = None
    summon: bool = False
    meeting: Meeting | None = None


def decide(now: float, state: JobState, settle_time: float) -> Decision:
    """Decides about the next view; after `settle_time` without an arrival fewer than `max_workers` suffice."""
    if state.forming is not None:
        return Decision(None, f"generation {state.forming.generation} is being stored")
    if state.finished is not None:
        return Decision(None, f"the job is done: its last step was {state.finished}")
    if state.view is not None and _is_over(state):
        meeting = convene(state)
        if meeting.lost:  # candidates that have some of it may be on their way back, if the coordinator is new
            patient_until = state.last_arrival + state.view.settings.failure_timeout
            if now < patient_until:
                return Decision(None, f"{meeting.reason}, unless they come back soon", patient_until)
        if meeting.over and state.returning():
            # A former member has a new session, and is about to say what it holds: that may be the line's.
            patient_until = state.last_arrival + state.view.settings.failure_timeout
            if now < patient_until:
                return Decision(None, "waiting for members that came back to report what they hold", patient_until)
        if meeting.members and state.storage_trouble:
            return Decision(None, f"the state cannot be stored: {state.storage_trouble}")
        reason = meeting.reason
        if not meeting.members and not meeting.over:
            reason = _with_way_out(state, state.view, reason)
        return Decision(meeting.members or None, reason, meeting=meeting)
    if state.live is not None:
        return _running(state, state.live)
    there = state.candidates()
    if not there:
        if state.view is not None:
            return Decision(None, f"generation {state.view.generation} is void, and there is no new worker")
        return Decision(None, "there is no worker")
    if state.storage_trouble:
        return Decision(None, f"the state cannot be stored: {state.storage_trouble}")
    if not (candidates := whole(there)):
        decision = Decision(None, f"waiting for the other ranks of {_parts_of(there)}")
    elif candidates[0].claimed_rank is not None:
        decision = _decide_explicit(candidates)
    else:
        decision = _decide_free(now, state, candidates, settle_time)
    if decision.members is None and all(s.met is not None and s.met.leaving for s in there):
        return _let_go(now, decision, there, _settled_at(state, there[0], settle_time))
    return decision


def _is_over(state: JobState) -> bool:
    """True if the last view's members must meet: one has stopped, or all have gone, or it is of a line and void."""
    assert state.view is not None
    present = state.present()
    if any(session.has_met for session in present):
        return True
    return state.view.base is not None and (state.verdict is not None or not present)


def _with_way_out(state: JobState, view: View, text: str) -> str:
    """Adds what an operator can do if no member of the view is heard of: they may be dead, or train on unseen."""
    present = state.present()
    if not present or not all(session.is_silent for session in present):
        return text
    ranks = {session.rank for session in present}
    return f"{text}, but {way_out(state, [seat for seat in view.seats if seat.rank in ranks])}"


def _running(state: JobState, live: View) -> Decision:
    size = live.settings.replica_size
    there = (len(live.seats) - len(state.endings)) // size
    text = f"{there} {noun(live.settings, there)} {'is' if there == 1 else 'are'} training"
    if live.lost:
        text += f"; {live.lost}"
    version = _why_old(state, live) if live.version < OURS.newest else ""
    if live.base is None:
        if count := len(state.candidates()) // size:
            version += f"; {count} more {'waits' if count == 1 else 'wait'} until they have ended"
        return Decision(None, text + version)
    if state.candidates() and (reason := _with_way_out(state, live, text)) != text:
        return Decision(None, reason)
    text += version
    fitting = _fitting(state, live)
    ready = len(fitting) // size
    if not ready:
        return Decision(None, text)
    if there >= live.settings.max_workers:
        return Decision(None, f"{text}, the maximum")
    if spares(state):
        node = _node_size(fitting)
        lacking = node - (there + ready) % node
        spare = f"{ready} {_plural('spare', ready)} {'waits' if ready == 1 else 'wait'} for {lacking} more"
        return Decision(None, f"{text}; {spare}, because members join in nodes of {node}")
    newcomer = "newcomer" if size == 1 else "new replica"
    return Decision(None, f"{text}; {ready} {_plural(newcomer, ready)} will join after this step", summon=True)


def _why_old(state: JobState, live: View) -> str:
    """Says in which version its members speak, and because of whom.

    What a member that is away speaks may not be known. So nobody is named before all are there: otherwise the sentence
    would change, and be logged, with each member that comes back.
    """
    text = f"; their generation speaks version {live.version} of the protocol"
    there = state.present()
    old = [live.seats[s.rank].short_label for s in there if s.rank is not None and s.versions.newest == live.version]
    if not old or any(session.stream is None for session in there):
        return text
    more = f" and {len(old) - _NAMED} more" if len(old) > _NAMED else ""
    return f"{text}, because {', '.join(old[:_NAMED])}{more} {'speaks' if len(old) == 1 else 'speak'} no newer one"


def spares(state: JobState) -> list[Session]:
    """Candidates that are ready and get no seat before others come, because members come in nodes."""
    if (live := state.live) is None or not (fitting := _fitting(state, live)):
        return []
    there, most, node = len(live.seats) - len(state.endings), live.settings.most, _node_size(fitting)
    return fitting if there < most and min(there + len(fitting), most) // node * node <= there else []


def _fitting(state: JobState, live: View) -> list[Session]:
    return whole(s for s in state.proven() if s.met is not None and s.met.manifest == live.manifest)


def _node_size(sessions: list[Session]) -> int:
    met = sessions[0].met
    return max(1, met.node_size) if met is not None else 1


def _decide_explicit(candidates: list[Session]) -> Decision:
    world = candidates[0].settings.max_workers
    by_rank = {s.claimed_rank: s for s in candidates if s.claimed_rank is not None}
    lacking = world - len(by_rank)
    if not lacking:
        return Decision(tuple(by_rank[rank] for rank in range(world)), f"all {world} ranks are there")
    # Lazily, because the world is whatever number the first worker wrote.
    named = list(itertools.islice((rank for rank in range(world) if rank not in by_rank), _NAMED))
    more = f" and {lacking - len(named)} more" if lacking > len(named) else ""
    return Decision(None, f"waiting for {_plural('rank', lacking)} {', '.join(map(str, named))}{more} of {world}")


def _decide_free(now: float, state: JobState, candidates: list[Session], settle_time: float) -> Decision:
    settings, replicas = candidates[0].settings, apart(candidates)
    least, most, count = settings.min_workers, settings.max_workers, len(replicas)
    if count < least:
        lacking = least - count
        return Decision(None, f"waiting for {lacking} more {noun(settings, lacking)} ({count} of at least {least})")
    if count >= most:
        chosen = sorted(replicas, key=lambda ranks: min(map(_brings, ranks)), reverse=True)[:most]
        return Decision(_in_order(chosen), f"{_there(settings, most)}, the maximum")
    there = _there(settings, count)
    if (rest := state.launches.awaited(now, state.candidates())) is not None:
        have = "has" if rest.missing == 1 else "have"
        text = f"{there} (at least {least}); {rest.missing} more of the launcher on {rest.host} {have} not joined yet"
        return Decision(None, text, rest.until)
    settled_at = _settled_at(state, candidates[0], settle_time)
    if now >= settled_at:
        return Decision(_in_order(replicas), f"{there} and no more joined for {settle_time:g} s")
    if settled_at == _patient_until(state, candidates[0]):
        text = f"{there} (at least {least}); former members of the job have time to come back"
        return Decision(None, text, settled_at)
    return Decision(None, f"{there} (at least {least}); waiting up to {settle_time:g} s for more", settled_at)


def _in_order(replicas: Sequence[Sequence[Session]]) -> tuple[Session, ...]:
    """Returns the ranks of replicas in the order of their seats: replicas of a host are neighbours."""
    ranks = {ranks[0]: ranks for ranks in replicas}
    return tuple(session for first in by_host(ranks) for session in ranks[first])


def _patient_until(state: JobState, candidate: Session) -> float:
    return max(state.patient_until, state.restored_at + candidate.settings.failure_timeout)


def _settled_at(state: JobState, candidate: Session, settle_time: float) -> float:
    """When a view may form of fewer than `max_workers`. Candidates may have waited long, but members may return."""
    return max(max(state.last_arrival, state.last_parting) + settle_time, _patient_until(state, candidate))


def _let_go(now: float, decision: Decision, candidates: list[Session], settled_at: float) -> Decision:
    """Dismisses candidates that all want to leave and are too few for a view, once no others are likely to come."""
    if now < settled_at:
        return replace(decision, again_at=settled_at)
    return replace(decision, meeting=Meeting(decision.reason, dismissed=tuple(candidates)))


def _brings(session: Session) -> Tag:
    """The latest state that a candidate holds or can read. Candidates with the latest state get seats first."""
    return (session.met.tag if session.met is not None else None) or Tag(0, 0)


def _there(settings: JobSettings, count: int) -> str:
    return f"{count} {noun(settings, count)} {'is' if count == 1 else 'are'} there"


def _parts_of(sessions: Sequence[Session]) -> str:
    """Names the replicas of these ranks."""
    count = len({session.replica for session in sessions})
    here = ", ".join(f"{s.process.host} (pid {s.process.pid})" for s in sessions[:_NAMED])
    more = f" and {len(sessions) - _NAMED} more" if len(sessions) > _NAMED else ""
    are = "is" if len(sessions) == 1 else "are"
    return f"{count} {noun(sessions[0].settings, count)}, of which {here}{more} {are} there"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
