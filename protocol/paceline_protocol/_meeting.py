"""How a line goes on from one generation to the next (I2).

When a generation is over, its members *meet*: each says which state it holds. The rules:

- A member *leads* if it got the base of the generation that is over; it may have gone further since. The next base is
  the greatest tag among the leaders. Nobody else counts, however great its tag: a zombie's may belong to another line.
- All members of the old generation take the base inside the meeting, before the next view forms. So if the donor dies,
  only the meeting is repeated.
- Newcomers get the ranks behind the others, and take the base when the view has formed. They lead as soon as a step was
  applied in that view; before, only together with a member that gave them the base.
- If nobody leads, and all who might are known to have ended, the line is over. Otherwise the others wait for them.

In a view without a base, whose members have yet to compare what they brought, everybody leads.

If the state is *sharded*, each member holds a share of it, and there are more rules:

- A tag counts only if those who are there hold all of its state between them (`lacking`); candidates that were members
  once count too, for equal tags are equal bits. If a share of the greatest tag is missing, the meeting waits while
  a silent member may have it. If all who had it are known to have ended, that state is lost. The state before the first
  step is never the next best: a member that has seen a later one looks for a checkpoint.
- A member that is prepared for a step which another has applied finishes it before anything else happens.
- The seats of the next view are given out first, and each member takes the share of its seat inside the meeting,
  newcomers too. Nobody drops what it had before the new generation runs. So whatever interrupts a meeting, no share is
  lost. A member that leaves, or gets no seat, gives what it has until the view has formed.

Each interleaving that these rules are for is a test.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from paceline_protocol._job_state import JobState, Session, Standing
from paceline_protocol._replicas import leavers, noun, of_one_mind, torn_apart, whole
from paceline_protocol._seating import holds, seated
from paceline_protocol._values import WHOLE, Lack, Meet, Seat, Share, Tag, View, lacking, share_of

_BEGINNING = Tag(0, 0)
"""The state before the first step, which members make for themselves."""

_NAMED = 8
"""Most members that are named: the sentence is for people."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The orders to the members of a generation that is over.

    `members` is empty while no view can form, and `newcomers` are the ranks among them that do not hold the base.
    `laggards` must take the base before anything else happens, from `donors`, who hold it or shares of it. `targets` is
    the share that each member must get, by member id, in rank order; empty if laggards take all that they have not.
    `mismatched` have another manifest than the line.

    The `dismissed` leave at once if no view forms, otherwise with the next view. `spares` get no seat, because members
    come in nodes. If the line is `over`, any worker that holds a state may begin a new one. Shares of the `lost` are
    useless, because no worker has the rest. The `late` have yet to stop.

    `wording` is `reason` with {} in place of names, if it waits for `late` or for `laggards`. `firm` is True if no
    member leads with a greater tag than `base`.
    """

    reason: str
    members: tuple[Session, ...] = ()
    base: Tag | None = None
    newcomers: tuple[int, ...] = ()
    manifest: bytes = b""
    laggards: tuple[Session, ...] = ()
    mismatched: tuple[Session, ...] = ()
    donors: tuple[Session, ...] = ()
    targets: Mapping[str, Share] = field(default_factory=dict)
    dismissed: tuple[Session, ...] = ()
    spares: tuple[Session, ...] = ()
    over: bool = False
    lost: tuple[Session, ...] = ()
    late: tuple[Session, ...] = ()
    wording: str = ""
    firm: bool = False


def convene(state: JobState) -> Meeting:
    """Decides about the generation after `state.view`, of which a member has stopped, or all have gone."""
    view = state.view
    assert view is not None, "a meeting is of a view's members"
    present = state.present()
    late = [session for session in present if not session.has_met]
    if late:
        begun = f"generation {view.generation} has ended; waiting for {{}} to leave the step"
        wording = "waiting for {} to begin session.steps()" if view.base is None else begun
        return Meeting(wording.format(names(view, late)), wording=wording, late=tuple(late))
    leading = [session for session in present if _leads(view, session)]
    leaders = of_one_mind(leading)
    if not leaders or not _may_speak(view, leaders):
        return _without_leader(state, view, present)
    found = _whole_base(state, view, present, leaders)
    if isinstance(found, Meeting):
        return found
    base, first, firm = found
    spread = _met(first).node_size != 1
    manifest = view.manifest or _met(first).manifest
    mismatched = tuple(session for session in [*present, *state.proven()] if _met(session).manifest != manifest)
    holders = _bring(state, present) if spread else leading
    donors = tuple(s for s in holders if _met(s).state == _met(first).state and _met(s).manifest == manifest)
    meeting = Meeting("", base=base, manifest=manifest, mismatched=mismatched, donors=donors, firm=firm)
    settled = {*donors, *mismatched}
    if not spread:
        going = leavers(present)
        behind = [s for s in present if s not in settled and s not in going]
        wording = f"waiting for {{}} to take the state of step {base.step}"
    else:
        behind = [s for s in holders if s not in settled and _met(s).prepared == base]
        wording = f"waiting for {{}} to finish step {base.step}"
    reason = wording.format(names(view, behind))
    meeting = _with(meeting, reason, wording=wording, laggards=tuple(behind))
    if odd := [session for session in present if _met(session).manifest != manifest]:
        text = f"waiting for {names(view, odd)} to leave: what it trains differs from the others'"
        return _with(meeting, text, firm=False)
    return meeting if behind else _seat(state, view, present, meeting)


def has_caught_up(view: View, meeting: Meeting, session: Session, before: Meet) -> bool:
    """Returns True if a laggard holds what it was to take, and nothing else about the meeting can have changed.

    `meeting` is as it was when this member was a laggard, and `before` what it had said then. What the meeting rests on
    may have been its own only if the state is spread.
    """
    met, first = _met(session), _met(meeting.donors[0])
    alike = (met.state, met.manifest, met.node_size) == (first.state, meeting.manifest, first.node_size)
    if not alike or met.prepared is not None or met.stored or session.rank is None or not _leads(view, session):
        return False
    if met.node_size == 1:
        return True
    if before.stored or session.rank in view.newcomers or before.prepared not in (None, meeting.base):
        return False
    if (met.leaving, met.closed) != (before.leaving, before.closed):  # then others may get other seats
        return False
    share = meeting.targets.get(session.member_id)
    if share is None or meeting.base is None:
        return before.prepared == meeting.base
    return holds(session, meeting.base, share)


def way_out(state: JobState, silent: Sequence[Seat]) -> str:
    """Says which members may hold the line's state and are silent, and what an operator can do about it."""
    more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
    names = ", ".join(seat.label for seat in silent[:_NAMED]) + more
    is_are, it_has = ("is", "it has") if len(silent) == 1 else ("are", "they have")
    known = f"if you know that {it_has} ended, run: paceline restart {state.name}"
    return f"{names} {is_are} silent and may hold the job's state; {known}"


def what_is_lost(reached: int | None, base: Tag) -> str:
    """Says which steps that the job had trained are lost to a line that begins at `base`; empty for none.

    `reached` is how many steps the line before is known to have committed, None if there was none.
    """
    if reached is None or 0 < base.step >= reached:
        return ""
    if base.step:
        text = f"no worker held the latest state of the job any more, so training went on from step {base.step}"
    else:
        text = (
            "no worker held the state of the job any more, and no checkpoint was found: training began at step 1 again"
        )
    steps = reached - base.step
    return text + (f"; at least {steps} step{'s are' if steps != 1 else ' is'} lost" if steps else "")


def _seat(state: JobState, view: View, present: Sequence[Session], meeting: Meeting) -> Meeting:
    """Decides who is in the next generation, once all of the old one hold the base."""
    going = leavers(present)
    staying = [session for session in present if session not in going]
    all_leave = not staying
    proven = state.proven()
    going = leavers(proven)
    fitting = whole(s for s in proven if _met(s).manifest == meeting.manifest and s not in going)
    kept = staying if staying or view.explicit else present  # with claimed ranks leavers need others in their place
    closed = any(_met(session).closed for session in present) and len(kept) >= _node_size(meeting)
    ready = [] if closed else _in_time(kept, fitting, meeting)
    if all_leave and (fitting or _is_to_be_kept(state, view, present, meeting)):
        # Some member must hold the base then, so they leave one step later.
        donors = set(meeting.donors)
        staying = whole(session for session in present if session in donors or _node_size(meeting) != 1)
    if not staying:
        text = f"all members of generation {view.generation} have left"
        return _with(meeting, text, dismissed=(*present, *going_candidates(state)))
    size, most = view.settings.replica_size, view.settings.most
    incoming = _incoming(view, staying, ready, most)
    members = _in_order(view, staying, incoming, meeting)
    count, needed = len(members), most if view.explicit else view.settings.min_workers * size
    if (closed or (all_leave and not ready)) and not view.explicit:
        needed = size  # no newcomer is admitted until the remaining members have finished their block
    stays, comes, sits = set(staying), set(incoming), set(members)
    leaving = (*(session for session in present if session not in stays), *going_candidates(state))
    if count < max(needed, 1):
        return _too_few(state, view, [*staying, *incoming], needed, _with(meeting, "", dismissed=leaving))
    newcomers = tuple(rank for rank, session in enumerate(members) if session in comes)
    spares = tuple(session for session in staying if session not in sits)
    on, new = (len(members) - len(newcomers)) // size, len(newcomers) // size
    member = "member" if size == 1 else "replica"
    text = f"{on} {member}{'s'[: on != 1]} of generation {view.generation} {'goes' if on == 1 else 'go'} on"
    if new:
        text += f" with {new} newcomer{'s'[: new != 1]}"
    if spares:
        text += f"; {names(view, spares)} will be spare"
    seating = _with(meeting, text, members=tuple(members), newcomers=newcomers, dismissed=leaving, spares=spares)
    return _share_out(view, seating)


def going_candidates(state: JobState) -> list[Session]:
    """Candidates that want to leave. They stay until the line surely does not need their state."""
    going = leavers(state.met_candidates())
    return [session for session in state.met_candidates() if session in going]


def _in_time(staying: Sequence[Session], ready: list[Session], meeting: Meeting) -> list[Session]:
    """The newcomers that are admitted now.

    If each that came while members take their shares changed the seats, the state would be cut anew for ever. So they
    wait for the next step, unless a member has gone that a seat was promised to: then the state is cut anew anyhow.
    """
    promised = [s for s in [*staying, *ready] if s.promised is not None and s.promised[0] == meeting.base]
    worlds = {session.promised[1] for session in promised if session.promised is not None}
    seats = set(promised)
    return [session for session in ready if session in seats] if worlds == {len(promised)} else ready


def _too_few(state: JobState, view: View, there: Sequence[Session], needed: int, meeting: Meeting) -> Meeting:
    """No view forms yet. Members that want to leave may, unless the others lack something that they hold."""
    node, size = max(1, _node_size(meeting)), view.settings.replica_size
    lacking_ = (-(-max(needed, 1) // node) * node - len(there)) // size
    of_node = f", in nodes of {node}" if node > 1 else ""
    why = f" ({state.verdict.text})" if state.verdict is not None else ""
    known = f"{len(there) // size} of at least {needed // size}{of_node}"
    workers = f"{lacking_} more {noun(view.settings, lacking_)} ({known})"
    dismissed = set(meeting.dismissed)
    staying = [session for session in meeting.donors if session not in dismissed]
    if meeting.dismissed and _lacks(staying, meeting.base).missing:
        text = f"waiting for {workers}, which must take over the state of {names(view, meeting.dismissed)}{why}"
        return _with(meeting, text, dismissed=())
    return _with(meeting, f"waiting for {workers}{why}")


def _is_to_be_kept(state: JobState, view: View, present: Sequence[Session], meeting: Meeting) -> bool:
    """True if all leave, the state is sharded, and the generation that is over can write no checkpoint any more."""
    node_size = _node_size(meeting)
    void = state.verdict is not None or len(present) < len(view.seats)
    return node_size != 1 and void and not view.explicit and len(present) >= node_size


def _share_out(view: View, meeting: Meeting) -> Meeting:
    """Lets members take the shares of their seats, if the state is sharded and some have not."""
    base, world, node_size = meeting.base, len(meeting.members), _node_size(meeting)
    assert base is not None
    if node_size == 1:
        return meeting
    targets = {s.member_id: share_of(rank, world, node_size) for rank, s in enumerate(meeting.members)}
    donors = set(meeting.donors)
    late = [s for s in meeting.members if s not in donors or not holds(s, base, targets[s.member_id])]
    if not late:
        return meeting
    wording = f"waiting for {{}} to take their part of the state of step {base.step}"
    text = wording.format(names(view, late))
    changes = {"members": (), "newcomers": (), "dismissed": (), "spares": ()}
    return _with(meeting, text, wording=wording, laggards=tuple(late), targets=targets, **changes)


def _in_order(view: View, staying: list[Session], incoming: list[Session], meeting: Meeting) -> list[Session]:
    assert meeting.base is not None
    if view.explicit:
        return sorted([*staying, *incoming], key=lambda session: session.claimed_rank or 0)
    return seated(staying, incoming, meeting.base, _node_size(meeting), view.settings.most)


def _incoming(view: View, staying: Sequence[Session], ready: Sequence[Session], most: int) -> list[Session]:
    if not view.explicit:
        return list(ready[: most - len(staying)])
    taken = {session.claimed_rank for session in staying}
    by_rank = {session.claimed_rank: session for session in reversed(ready) if session.claimed_rank not in taken}
    return list(by_rank.values())


def _without_leader(state: JobState, view: View, present: Sequence[Session]) -> Meeting:
    """No member here holds the line's state. One that does may still be running, unless it is known to have ended."""
    silent = [view.seats[rank] for rank, ending in sorted(state.endings.items()) if not ending.sure]
    if silent:
        return Meeting(f"generation {view.generation} cannot go on: {way_out(state, silent)}")
    if going := _going(state, view):
        return Meeting(f"waiting for {names(view, going)} to leave")
    taking = [session for session in present if session.catching_up]
    if taking:
        return Meeting(f"waiting for {names(view, taking)} to report whether the line's state arrived in time")
    text = f"all members that held the state of generation {view.generation} have ended: a new line begins"
    torn = torn_apart(present)
    if torn and not of_one_mind(s for s in _bring(state, present) if _met(s).tag is not None):
        # A replica was taking the state, rank by rank, when the last one that held it ended.
        text = f"the ranks of a replica hold different states, and nobody has the rest: {names(view, torn)}"
        return Meeting(text, over=True, lost=tuple(torn))
    return Meeting(text, over=True)


def _going(state: JobState, view: View) -> list[Session]:
    """Members that may leave and are still there: they write a checkpoint first, or have not heard of it yet."""
    there = state.sessions.values()
    return [s for s in there if s.standing is Standing.DISMISSED and s.generation == view.generation]


def _whole_base(
    state: JobState, view: View, present: Sequence[Session], leaders: Sequence[Session]
) -> tuple[Tag, Session, bool] | Meeting:
    """The greatest tag of a leader whose state is there as a whole, and a member that holds it; else what to wait for.

    The third value is True if no leader named a greater tag.
    """
    lost = ""
    everyone = _bring(state, present)
    prepared = {_met(session).prepared for session in leaders}  # these will lead with it, if any member has applied it
    held = [(_met(session).tag, session) for session in [*reversed(everyone), *reversed(leaders)]]
    leading = set(leaders)
    firsts = {tag: s for tag, s in held if tag is not None and (s in leading or tag in prepared)}
    brought, absent = _Brought(everyone), _Absent(state, view, present)
    for tag, first in sorted(firsts.items(), key=lambda item: item[0], reverse=True):
        if lost and view.base is None and tag == _BEGINNING:
            break  # everyone can build it, but must not if a later state is known
        lacks = brought.lacks(tag, _met(first).fingerprint)
        if not lacks.missing:
            return tag, first, not lost
        if (text := absent.may_have(tag)) is not None:
            return Meeting(f"generation {view.generation} cannot go on: {_in_words(lacks)} is missing; {text}")
        lost = lost or f"{_in_words(lacks)} of the state of step {tag.step} is lost with {_ended(state, view)}"
    return Meeting(lost, over=True, lost=tuple(s for s in everyone if _is_of_no_use(s, brought)))


class _Brought:
    """The reports of what workers hold, by state: each may name another one, and all are looked at once."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._holders: dict[tuple[Tag | None, bytes], list[Session]] = {}
        self._finishers: dict[Tag | None, list[Session]] = {}
        self._lacks: dict[tuple[Tag, bytes], Lack] = {}
        for session in sessions:
            met = _met(session)
            self._holders.setdefault((met.tag, met.fingerprint), []).append(session)
            self._finishers.setdefault(met.prepared, []).append(session)

    def lacks(self, tag: Tag, fingerprint: bytes) -> Lack:
        """Returns the parts of a state that these workers neither hold nor can make by finishing a step."""
        known = self._lacks.get((tag, fingerprint))
        if known is None:
            there = [*self._holders.get((tag, fingerprint), ()), *self._finishers.get(tag, ())]
            known = self._lacks[tag, fingerprint] = _lacks(there, tag)
        return known


def _is_of_no_use(session: Session, brought: _Brought) -> bool:
    """True if no worker has the rest of the state that it holds or could finish. A whole state may begin a new line."""
    met = _met(session)
    states = [(met.tag, met.fingerprint), (met.prepared, b"")]
    return all(tag is None or brought.lacks(tag, bits).missing for tag, bits in states)


class _Absent:
    """Workers that may bring what is missing of a state, looked at once for all states that are named."""

    def __init__(self, state: JobState, view: View, present: Sequence[Session]) -> None:
        self._state = state
        self._view = view
        self._silent = [view.seats[rank] for rank, ending in sorted(state.endings.items()) if not ending.sure]
        self._returning = state.returning()
        taking = [s for s in [*present, *state.met_candidates()] if s.catching_up]
        self._unknown = [*taking, *self._returning]  # they have yet to say what they hold
        self._detached: dict[Tag | None, list[Session]] = {}  # candidates, by what they hold or can finish
        for session in state.sessions.values():
            if session.standing is Standing.CANDIDATE and session.stream is None and session.met is not None:
                for tag in {session.met.tag, session.met.prepared}:
                    self._detached.setdefault(tag, []).append(session)

    def may_have(self, tag: Tag) -> str | None:
        """Says which workers may bring the missing part of a state; None if none can."""
        if self._silent:
            return way_out(self._state, self._silent)
        coming = [*self._detached.get(tag, ()), *self._unknown]
        if not coming:
            return None
        what, which = ("what it holds", "it") if len(coming) == 1 else ("what they hold", "one of them")
        text = f"waiting for {names(self._view, coming)} to report {what}"
        if not self._returning:
            return text
        processes = ", ".join(f"pid {s.process.pid} on {s.process.host}" for s in self._returning[:_NAMED])
        return f"{text}; if {which} hangs, end its process ({processes})"


def _bring(state: JobState, present: Sequence[Session]) -> list[Session]:
    """All workers that have said what they hold: members, and candidates that may have been members once."""
    return [*present, *state.met_candidates()]


def _lacks(sessions: Sequence[Session], tag: Tag | None) -> Lack:
    """The shares of a state that none of these members holds; a checkpoint that one of them can read has all of it."""
    shares: list[Share] = []
    for session in sessions:
        met = _met(session)
        if met.tag == tag:
            shares += [WHOLE] if met.stored else met.shares
        elif met.prepared == tag:
            shares += met.shares
    return lacking(shares)


def _ended(state: JobState, view: View) -> str:
    ended = [f"{view.seats[rank].short_label}, which {ending.how}" for rank, ending in sorted(state.endings.items())]
    return "; ".join(ended[:_NAMED]) or "members that are gone"


def _in_words(lacks: Lack) -> str:
    parts = ", ".join(map(str, lacks.first))
    return f"part{'s'[: lacks.missing != 1]} {parts} of {lacks.parts}"


def _node_size(meeting: Meeting) -> int:
    return _met(meeting.donors[0]).node_size


def _leads(view: View, session: Session) -> bool:
    met = _met(session)
    return met.tag is not None and (met.holds_base or view.base is None)


def _may_speak(view: View, leaders: Sequence[Session]) -> bool:
    """False if only newcomers hold the base: the members that gave it to them may have gone on without them.

    A newcomer takes the base from members that may not have heard of the new generation yet. If those lose the
    coordinator for long they go on in the old one, and commit. Not so once a step was applied in the new generation:
    all of it had to be there. What newcomers hold is not lost: they bring it to a new line, as do all who come back.
    """
    newcomers = set(view.newcomers)
    return view.base is None or any(s.rank not in newcomers or _met(s).tag != view.base for s in leaders)


def _met(session: Session) -> Meet:
    assert session.met is not None
    return session.met


def names(view: View, sessions: Collection[Session]) -> str:
    """Names the first of these members, and says how many more there are."""
    first = islice(sessions, _NAMED)
    named = [view.seats[s.rank].short_label if s.rank is not None else s.process.host for s in first]
    more = len(sessions) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _with(meeting: Meeting, reason: str, **changes: object) -> Meeting:
    return replace(meeting, reason=reason, **changes)  # type: ignore[arg-type]


class Awaited:
    """The members that a meeting waits for, crossed off one by one without looking at all others each time.

    Each of W members says that it has stopped, and then perhaps that it has taken the base. To convene the meeting anew
    each time would cost W^2 for each change of generation. As long as others are waited for, only the sentence changes.
    This rests on nothing else having changed since the meeting was convened: any other event convenes it anew.

    `present` is how many members of the view are there.
    """

    def __init__(self, view: View, meeting: Meeting, present: int) -> None:
        self.meeting = meeting
        self._view = view
        self._present = present
        # If another tag was in question, a member that drops it may change which state is the base.
        self._left = OrderedDict.fromkeys(meeting.late or (meeting.laggards if meeting.firm else ()))

    def __iter__(self) -> Iterator[Session]:
        return iter(self._left)

    def __contains__(self, session: object) -> bool:
        return session in self._left

    def cross_off(self, session: Session, before: Meet | None) -> str | None:
        """Notes what a member says, and said `before`; returns the new sentence, None if it must be convened anew."""
        if session not in self._left or not session.has_met or session.is_silent:
            return None
        if self.meeting.late or session.met != before:  # else nobody gave it the base, and it still lacks it
            if len(self._left) == 1 or not self._is_done(session, before):
                return None
            del self._left[session]
        return self.meeting.wording.format(names(self._view, self._left))

    def _is_done(self, session: Session, before: Meet | None) -> bool:
        if not self.meeting.late:
            return before is not None and has_caught_up(self._view, self.meeting, session, before)
        # When half of the members have stopped, the time of the others begins to run: `Stragglers` must see that.
        return not 2 * (len(self._left) - 1) <= self._present < 2 * len(self._left)
