"""What members are told about a meeting, each thing once. Pure; part of a job's membership.

An order is given again when its receiver has said something new (`Met`), or has come back on a new stream: what it was
told may have been lost with the old one.
"""

from __future__ import annotations

from paceline_server.effects import Effect, PushCatchUp, PushMisfit, PushMissing, PushRunning, PushSummons
from paceline_server.meeting import Meeting
from paceline_server.model import JobState, Seat, Session, View
from paceline_server.policy import Decision
from paceline_server.shares import Share

__all__ = ["Orders"]


class Orders:
    """Remembers what was ordered.

    Args:
        state: the job; `told_to_meet` of its sessions is read and written here.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._summoned = ""  # who was asked to raise the flag in this generation

    def forget(self, session: Session) -> None:
        """What this member was told is to be told again."""
        session.told_to_meet = None
        if session.member_id == self._summoned:
            self._summoned = ""

    def clear(self) -> None:
        """A new view has formed."""
        self._summoned = ""
        for session in self._state.sessions.values():
            session.told_to_meet, session.catching_up, session.promised = None, False, None

    def give(self, decision: Decision) -> list[Effect]:
        """What to tell whom, now that the policy has decided."""
        view = self._state.view
        if view is None or self._state.finished is not None:
            return []
        effects: list[Effect] = []
        if self._state.is_elastic:
            effects += self._tell_candidates(view) + self._ask_for_missing(view)
        if decision.summon:
            effects += self._summon(view)
        if decision.meeting is not None:
            effects += self._tell_laggards(decision.meeting)
        return effects

    def _tell_candidates(self, view: View) -> list[Effect]:
        effects: list[Effect] = []
        for session in self._state.candidates():
            if session.met is None or session.met.unproven:
                if session.told_to_meet is None:
                    session.told_to_meet = view.generation
                    effects.append(PushRunning(session.member_id, view))
            elif view.base is not None and session.met.manifest != view.manifest:
                effects += self._misfit(session, self._state.present())
        return effects

    def _ask_for_missing(self, view: View) -> list[Effect]:
        """Who is not heard of may be gone, which its host knows: a line need not wait for it then."""
        silent = {s.member_id for s in self._state.present() if s.stream is None}
        silent |= {view.seats[rank].member_id for rank, ending in self._state.endings.items() if not ending.sure}
        if not silent:
            return []
        effects: list[Effect] = []
        seats = [seat for seat in view.seats if seat.member_id in silent]
        for session in [*self._state.candidates(), *(s for s in self._state.present() if s.has_met)]:
            visible = [seat for seat in seats if session.process.can_see(seat.process)]
            names = frozenset(seat.member_id for seat in visible)
            if not names <= session.told_missing:
                session.told_missing = names
                effects.append(PushMissing(session.member_id, tuple(seat.process for seat in visible)))
        return effects

    def _summon(self, view: View) -> list[Effect]:
        asked = self._state.sessions.get(self._summoned)
        if asked is not None and asked.stream is not None:
            return []
        attached = next((session for session in self._state.present() if session.stream is not None), None)
        if attached is None:
            return []
        self._summoned = attached.member_id
        return [PushSummons(attached.member_id, view.generation)]

    def _tell_laggards(self, meeting: Meeting) -> list[Effect]:
        effects: list[Effect] = []
        for session in meeting.misfits:
            effects += self._misfit(session, list(meeting.donors))
        assert meeting.base is not None or not meeting.laggards
        live = [(donor, donor.met) for donor in meeting.donors if donor.met is not None and not donor.met.stored]
        donors = tuple((_seat(donor), met.shares) for donor, met in live)
        fingerprint = meeting.donors[0].met.fingerprint if meeting.donors and meeting.donors[0].met is not None else b""
        for rank, member_id in enumerate(meeting.targets):
            assert meeting.base is not None
            self._state.sessions[member_id].promised = (meeting.base, len(meeting.targets), rank)
        for session in meeting.laggards:
            share = meeting.targets.get(session.member_id) or _own_share(session)
            order = (meeting.base, share or donors)  # as long as it takes a share, others' shares come and go
            if session.told_to_meet != order and meeting.base is not None:
                session.told_to_meet, session.catching_up = order, True
                order_ = PushCatchUp(session.member_id, session.generation, meeting.base, donors, share, fingerprint)
                effects.append(order_)
        return effects

    def _misfit(self, session: Session, donors: list[Session]) -> list[Effect]:
        view = self._state.view
        donor = next((each for each in donors if each.stream is not None), None)
        if donor is None or view is None or session.told_to_meet == donor.member_id:
            return []
        session.told_to_meet = donor.member_id
        return [PushMisfit(session.member_id, _seat(donor))]


def _own_share(session: Session) -> Share | None:
    """What it keeps, if it has a part of a spread state, and is to finish the step that others have applied."""
    met = session.met
    return met.shares[0] if met is not None and met.node_size != 1 and met.shares else None


def _seat(session: Session) -> Seat:
    """Where a member is reached; a candidate has no rank, and is as good as any."""
    rank = session.rank or 0
    return Seat(rank, session.member_id, session.token_sha256, session.process, session.address, session.arrival)
