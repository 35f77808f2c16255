"""The messages to members between two generations: orders, donors of a state, and the sentence of the decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paceline_protocol._events import Effect, Send
from paceline_protocol._job_state import JobState, Session
from paceline_protocol._lookouts import Lookouts, Sight
from paceline_protocol._meeting import Meeting
from paceline_protocol._policy import Decision
from paceline_protocol._replicas import in_lane
from paceline_protocol._values import WHOLE, Member, Seat, Share, View
from paceline_protocol.messages import CatchUp, Mismatch, Running, Summons, Waiting

Donor = tuple[Member, tuple[Share, ...]]
"""A member that holds a state, with its shares of it."""

_NAMED = 16
"""Number of donors in an order. A state comes from all of them at once, and one of them suffices."""

_LEAST = 2
"""Number of donors for each part of a sharded state with many parts: one donor may be about to die. If each member
holds a part of its own, all of them are named."""


class Donors:
    """The members that hold a state, of which each laggard is told a few, and other ones each time.

    To name all of them in each order would make orders as long as the job is wide, and each laggard would dial all.
    """

    def __init__(self, donors: Sequence[Session]) -> None:
        by_share: dict[Share, list[Session]] = {}
        for donor in donors:
            for share in donor.met.shares or (WHOLE,) if donor.met is not None else ():
                by_share.setdefault(share, []).append(donor)
        self._all = dict.fromkeys(donors)
        self._most = max(_LEAST, _NAMED // max(1, len(by_share)))
        # A member without a stream may be dead.
        attached = ([donor for donor in group if donor.stream is not None] or group for group in by_share.values())
        self._groups = list(attached)
        self._few = all(len(group) <= self._most for group in by_share.values())
        self._everyone = tuple(map(_donor, donors)) if self._few else ()

    def some(self, session: Session, turn: int) -> tuple[Donor, ...]:
        """Returns the donors that one member is told. Consecutive turns name other ones, until all have been named.

        If the member holds some of the state itself, it is named too: that part it need not take.
        """
        if self._few:
            return self._everyone
        chosen = {session: None} if session in self._all else {}
        for group in self._groups:
            step = max(1, len(group) // self._most)  # far apart: neighbours share a host, and its fate
            for place in range(min(self._most, len(group))):
                chosen[group[(turn + place * step) % len(group)]] = None
        return tuple(map(_donor, chosen))


def seat_of(session: Session) -> Seat:
    """A member's address as a seat of its lane. A candidate has no rank; it gets rank 0, which is not used."""
    rank = (session.rank or 0) // session.settings.replica_size
    return Seat(rank, session.member_id, session.process, session.address, session.token_sha256, session.arrival)


def _donor(session: Session) -> Donor:
    assert session.met is not None
    return seat_of(session), session.met.shares


class Orders:
    """Gives orders to members, each once, and remembers which.

    An order is given again when its receiver has said something new (`Meet`), or has come back on a new stream, for
    what it was told may have been lost with the old one. An order to take a state is about that state, not about its
    donors: a donor that comes or goes changes no order. A laggard that got the state from none of its donors says so,
    and is told others.

    `told_to_meet` of the sessions is read and written here. What `lookouts` ask is no order: it is asked again and
    again.
    """

    def __init__(self, state: JobState) -> None:
        self.lookouts = Lookouts()
        self._state = state
        self._summoned = ""  # the member that was asked to raise the flag in this generation
        self._turns: dict[str, int] = {}  # by member: which donors it is told next
        self._donors: dict[int, Donors] = {}  # of the meeting that is on, by position

    def forget(self, session: Session) -> None:
        """Forgets what this member was told, so that it is told again."""
        session.told_to_meet = None
        if session.member_id == self._summoned:
            self._summoned = ""

    def clear(self) -> None:
        """Forgets everything, because a new view has formed."""
        self._summoned = ""
        self._turns.clear()
        for session in self._state.sessions.values():
            session.told_to_meet, session.catching_up, session.promised = None, False, None

    def give(self, now: float, decision: Decision) -> list[Effect]:
        """The messages to members and candidates, now that the policy has decided."""
        view = self._state.view
        self._donors.clear()
        if view is None or self._state.finished is not None:
            return [*self.lookouts.look(now, {}, ())]
        effects: list[Effect] = []
        missing: dict[Sight, list[Seat]] = {}
        if self._state.is_elastic:
            missing = self._not_heard_of(view)
            effects += self._tell_candidates(view)
        effects += self.lookouts.look(now, missing, list(self._who_wait()) if missing else ())
        if decision.summon:
            effects += self._summon(view)
        if decision.meeting is not None:
            effects += self._tell_laggards(decision.meeting)
        return effects

    def give_one(self, now: float, session: Session, meeting: Meeting | None) -> list[Effect]:
        """Returns what to tell a member that has said something by which nothing has changed for the others.

        `meeting` is what it still has to do something for, None if it has done what it was told to.
        """
        effects: list[Effect] = [*self.lookouts.look_too(now, [session])]
        return effects + (self._tell_laggard(meeting, session) if meeting is not None else [])

    def _tell_candidates(self, view: View) -> list[Effect]:
        effects: list[Effect] = []
        ended = in_lane(self._state.endings, view.settings.replica_size)
        for session in self._state.candidates():
            if session.met is None or session.met.unproven:
                order = (view.generation, ended)
                if session.told_to_meet != order:
                    session.told_to_meet = order
                    effects.append(Send(session.member_id, Running(view, ended, session.position)))
            elif view.base is not None and session.met.manifest != view.manifest:
                effects += self._mismatch(session, self._state.present())
        return effects

    def _who_wait(self) -> Iterator[Session]:
        """Yields the workers that wait. In a replica without one of its ranks the others do too, wherever they are."""
        yield from self._state.candidates()
        is_void = self._state.verdict is not None
        for session in self._state.of_view():
            if session.stream is not None and (session.has_met or (is_void and session.replica)):
                yield session

    def _not_heard_of(self, view: View) -> dict[Sight, list[Seat]]:
        silent = [view.seats[s.rank] for s in self._state.of_view() if s.stream is None and s.rank is not None]
        silent += [view.seats[rank] for rank, ending in self._state.endings.items() if not ending.sure]
        known = {seat.member_id for seat in silent}
        silent += [seat for seat in self._state.astray.values() if seat.member_id not in known]
        missing: dict[Sight, list[Seat]] = {}
        for seat in sorted(silent, key=lambda seat: seat.rank):
            # Without its start time another process could be taken for it.
            if (sight := seat.process.sight) is not None and seat.process.start_ticks:
                missing.setdefault(sight, []).append(seat)
        return missing

    def _summon(self, view: View) -> list[Effect]:
        asked = self._state.sessions.get(self._summoned)
        if asked is not None and asked.stream is not None:
            return []
        attached = next((session for session in self._state.present() if session.stream is not None), None)
        if attached is None:
            return []
        self._summoned = attached.member_id
        return [Send(attached.member_id, Summons(view.generation))]

    def _tell_laggards(self, meeting: Meeting) -> list[Effect]:
        effects: list[Effect] = []
        for session in meeting.mismatched:
            effects += self._mismatch(session, list(meeting.donors))
        for rank, member_id in enumerate(meeting.targets):
            assert meeting.base is not None
            self._state.sessions[member_id].promised = (meeting.base, len(meeting.targets), rank)
        for session in meeting.laggards:
            effects += self._tell_laggard(meeting, session)
        return effects

    def _tell_laggard(self, meeting: Meeting, session: Session) -> list[Effect]:
        assert meeting.base is not None
        share = meeting.targets.get(session.member_id) or _own_share(session)
        order = (meeting.base, share)
        if session.told_to_meet == order:
            return []
        session.told_to_meet, session.catching_up = order, True
        lane = session.position
        if lane not in self._donors:
            live = [donor for donor in meeting.donors if donor.met is not None and not donor.met.stored]
            self._donors[lane] = Donors([donor for donor in live if donor.position == lane])
        turn = self._turns.get(session.member_id, len(self._turns))
        self._turns[session.member_id] = turn + 1
        donors = self._donors[lane].some(session, turn)
        first = meeting.donors[0].met
        fingerprint = first.fingerprint if first is not None else b""
        order_to_take = CatchUp(session.generation, meeting.base, donors, share, fingerprint)
        return [Send(session.member_id, order_to_take)]

    def _mismatch(self, session: Session, donors: list[Session]) -> list[Effect]:
        view = self._state.view
        lane = session.position
        donor = next((each for each in donors if each.stream is not None and each.position == lane), None)
        if donor is None or view is None or session.told_to_meet == donor.member_id:
            return []
        session.told_to_meet = donor.member_id
        return [Send(session.member_id, Mismatch(seat_of(donor)))]


def _own_share(session: Session) -> Share | None:
    """The share that a member keeps when it finishes a step that others have applied; None if the state is whole."""
    met = session.met
    return met.shares[0] if met is not None and met.node_size != 1 and met.shares else None


_NEVER = float("inf")


class Announcer:
    """Decides who is told the sentence of the policy's decision, and when.

    A newcomer hears it at once. The others hear a changed sentence at most once in `interval`: each arrival of W
    workers changes it, and telling all of them each time would make W^2 messages.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last_round = -_NEVER
        self.announce_at = _NEVER

    def announce(
        self, now: float, reason: str, waiting: Iterable[Session], newcomers: Iterable[Session] = ()
    ) -> list[Effect]:
        """Returns what to send now that the sentence is `reason`; `newcomers` are those that have just come (back)."""
        effects: list[Effect] = []
        for newcomer in newcomers:
            newcomer.told = reason
            effects.append(Send(newcomer.member_id, Waiting(reason)))
        due = self._last_round + self._interval
        if now < due:
            self.announce_at = due if any(session.told != reason for session in waiting) else _NEVER
            return effects
        others = [session for session in waiting if session.told != reason]
        for session in others:
            session.told = reason
            effects.append(Send(session.member_id, Waiting(reason)))
        if others:
            self._last_round = now
        self.announce_at = _NEVER
        return effects
