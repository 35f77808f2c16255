"""Counts what happens to one job, and says what of it is worth an event. Pure: it is told the time.

A `Tally` is given what the job's `Membership` is given (events) and what that decides (effects), in the same order. It
changes nothing of the job. Its counters never fall, since Prometheus takes a counter that falls for a restart: a second
is counted when it is known what it was, and not before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline_protocol import Counters, Ending, Seat, Verdict, View
from paceline_protocol.coordinator import (
    AddressRefused,
    Effect,
    EndSession,
    Event,
    ExitReported,
    FinishStored,
    Heard,
    JobState,
    LeftJob,
    MetOthers,
    Registered,
    Reported,
    Resumed,
    Session,
    Standing,
    StoreEnding,
    StoreVerdict,
    StreamEnded,
    ViewStored,
)
from paceline_server.happenings import Happening, cut, how_it_began, how_it_went, label, named, of_orders
from paceline_server.history import History
from paceline_server.measures import Histogram, Rate
from paceline_server.reports import Reports
from pacelinepb import MOST_KINDS
from pacelinepb.v1.errors_pb2 import ErrorReason

Use = Literal["committed", "undone", "reforming", "waiting"]

USES: tuple[Use, ...] = ("committed", "undone", "reforming", "waiting")
"""The kinds of seconds of a job: training that counts, training that was undone, on the way to the next generation, or
waiting for workers, also for one that holds up a stalled job."""

CHANGE_REASONS = ("began", "lost", "joined", "drained", "mismatch", "raised", "skipped", "timeout", "other")

LOSSES = ("exited", "silent", "refused", "raised", "replaced", "evicted")
"""How a member was lost: its process ended; it was silent for too long; nobody listens at its address; its own code
raised; its process came back as a new member; the others could not go on with it, or an operator took it for dead."""

_KNOWN = ("exited", "raised", "replaced")
"""Losses that nothing more is to be learnt of."""

_REASONS: dict[int, str] = {
    ErrorReason.ERROR_REASON_PEER_LOST: "lost",
    ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH: "mismatch",
    ErrorReason.ERROR_REASON_PEER_RAISED: "raised",
    ErrorReason.ERROR_REASON_STEP_DIFFERS: "mismatch",
    ErrorReason.ERROR_REASON_STEP_SKIPPED: "skipped",
    ErrorReason.ERROR_REASON_TIMEOUT: "timeout",
}

KEPT_S = 60.0
"""Seconds for which members that have gone are shown."""

MOST_GONE = 100
"""The most members that have gone that are shown."""

_WITH_OUTPUT = 8
"""Members that have ended in the last minute whose last lines are kept: 2 KB each, in each message of the page."""

_REASON_EVERY_S = 1.0
"""Least seconds between two events that say why a job stands where it does: 1,000 arrivals have 1,000 reasons."""

_NEWS_S = 5.0
"""Seconds for the news that the process of a lost member has ended, which its links may tell before its launcher."""

LEFT = "left the job"
"""How a member went that has not said of an error."""


@dataclass(slots=True)
class Gone:
    """A member that has ended."""

    at: float
    member_id: str
    session: Session
    how: str
    """Completes "rank 2 (host-b, pid 4711) ...". (The label `how` of the metric `paceline_members_lost` is `loss`.)"""
    found_gone: bool = False
    """True if its process is known to have ended, but nobody has told how."""
    loss: str = ""
    """One of `LOSSES` that it is to be counted under, unless somebody has seen its process end; empty if it counts."""
    output: str = ""
    """The last lines that it printed, if its launcher has sent them; kept of `_WITH_OUTPUT` members alone."""


@dataclass(slots=True)
class _Member:
    """The tally's record of a member while its session lasts."""

    session: Session
    since: float
    """When it registered."""
    joins: bool = False
    """True if it came to a line that was running, and has no seat yet."""
    counters: Counters = field(default_factory=Counters)
    restored: bool = False
    """True until its first heartbeat if it has registered with an earlier coordinator."""


class Tally:
    """Counts the events and seconds of one job, whose state it reads and does not change.

    `started` is when the first worker came; None if an earlier coordinator has seen that.
    Seconds in `waited` and `state_time` are those of all members together. `samples` are those of committed steps.
    Hosts with disks of their own have one each of `checkpoint_failures`. `generations` are counted by `CHANGE_REASONS`.

    `detection` is from the first sign that a member was lost to the verdict; `recovery` from that sign to the first
    step that the next generation has committed; `join` from the registration of a member that joins a running job to
    its seat; `checkpoint` is how long the writes of checkpoints took.
    """

    def __init__(self, now: float, state: JobState) -> None:
        self.committed = self.undone = 0
        self.generations: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self.step = state.reached or 0
        self.gone: deque[Gone] = deque(maxlen=MOST_GONE)
        self.detection, self.recovery, self.join = Histogram(), Histogram(), Histogram()
        self.checkpoint = Histogram()
        self.checkpoint_step = 0
        self._kept = 0  # checkpoints of steps up to this one are counted
        self._members = {id_: _Member(session, now, restored=True) for id_, session in state.sessions.items()}
        # An OrderedDict finds its first member at once, however many have been removed before.
        self._here = OrderedDict((id_, each) for id_, each in state.sessions.items() if each.stream is not None)
        self.started: float | None = None
        self.samples = self.state_bytes = self.checkpoint_failures = 0
        self.waited = self.state_time = 0.0
        self._sent_bytes: Counter[str] = Counter()
        self._kinds: set[str] = set()
        self._seconds: dict[Use, float] = dict.fromkeys(USES, 0.0)
        self._mark = now  # seconds up to here are counted
        self._stalled = 0.0  # seconds since then of stalls that have ended
        self._use: Use | None = None  # what the time since is, as far as that is known; None: of no job
        self._view: View | None = state.view  # the last one that formed
        self._began = now
        self._word = 0  # the last step word of this view that is known to have completed
        self._signs: dict[str, float] = {}  # when members of the live view were first suspected
        self._recovering: float | None = None  # since when
        self._void: Verdict | None = state.verdict  # of the last view
        self._last_void = 0  # the last generation that a verdict has ended
        self._undone_in = -1  # the one of these whose undone step is counted
        self._live = state.live is not None
        self._restored = state.view is not None  # what its members have done so far is not known
        self._speed = Rate(now)
        self.reports = Reports(now)
        self.checkpoint_at: float | None = None
        self.history = History()
        self._reason = self._reason_told = ""
        self._reason_at = float("-inf")

    # What is read -----------------------------------------------------------------------------------------------------

    def seconds(self, now: float) -> dict[Use, float]:
        """Returns the seconds of the job so far, by what they were."""
        if not self._live:  # else a heartbeat will say what the time since the last step word was
            self._count(now)
        return dict(self._seconds)

    def goodput(self, now: float) -> float:
        """Returns the share of the job's seconds that led to committed steps, 0 to 1; 0 if there are none.

        The seconds of a stall are in it at once.
        """
        seconds, stalled_at = self.seconds(now), self.reports.stalled_at
        total = sum(seconds.values()) + self._stalled
        if stalled_at is not None:
            total += max(0.0, now - max(stalled_at, self._mark))
        return seconds["committed"] / total if total else 0.0

    def steps_per_second(self, now: float) -> float:
        """Returns the committed steps of each of the last 10 s."""
        return self._speed.per_second(now)

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Bytes that members have sent to each other, by kind of link."""
        return self._sent_bytes

    def counters_of(self, member_id: str) -> Counters:
        """Returns what a member has counted."""
        member = self._members.get(member_id)
        return Counters() if member is None else member.counters

    def losses(self, now: float) -> Counter[str]:
        """Returns the members that were lost, by `LOSSES`; of some, how is known after a few seconds."""
        for gone in self.gone:
            if gone.loss and gone.at < now - _NEWS_S:
                self._count_loss(gone, gone.loss)
        return self._lost

    @property
    def members_lost(self) -> int:
        """Members that were lost."""
        return self._lost.total() + sum(bool(gone.loss) for gone in self.gone)

    def gone_lately(self, now: float) -> list[Gone]:
        """Returns members that have ended in the last minute, in the order in which they did."""
        return [gone for gone in self.gone if gone.at >= now - KEPT_S]

    # What happens -----------------------------------------------------------------------------------------------------

    def saw(self, now: float, event: Event, effects: Iterable[Effect], state: JobState) -> list[Happening]:
        """Takes note of an event and of what followed; returns what is worth an event. `state` is the job after it."""
        if isinstance(event, Heard):  # by far the most frequent event
            return self._heard(now, event, state)
        found: list[Happening] = []
        self._notice(now, event, state)
        endings: dict[str, Ending] = {}
        for effect in effects:
            match effect:
                case StoreEnding(generation, rank, ending):
                    if self._view is not None and self._view.generation == generation:
                        member_id = self._view.seats[rank].member_id
                        endings[member_id] = ending
                case StoreVerdict(verdict):
                    found += self._voided(now, verdict)
                case EndSession(member_id, _):
                    self._here.pop(member_id, None)
                    found += self._ended(now, event, member_id, endings.get(member_id), state)
        if isinstance(event, ExitReported):
            found += self._amend_by(now, event)
        for member_id, ending in endings.items():
            self._amend(now, member_id, ending)
        view = state.view
        if isinstance(event, ViewStored) and view is not None and view.generation == event.generation:
            found += self._formed(now, view, state)
        found += of_orders(event, state)
        if isinstance(event, FinishStored) and state.finished is not None:
            self._reach(now, event.step)
            found += self._stall_changed(now, state)
            self._count(now, "committed" if self._word else None)
            found.append(self._happening("finished", f"the job is done: its last step was {state.finished}"))
        self._stand(now, state)
        return found

    def reason(self, now: float, reason: str) -> list[Happening]:
        """Takes note of why the job stands where it does; returns an event once a second at most."""
        self._reason = reason
        if not reason or reason == self._reason_told or now < self._reason_at + _REASON_EVERY_S:
            return []
        self._reason_told, self._reason_at = reason, now
        return [self._happening("reason", reason)]

    def _heard(self, now: float, event: Heard, state: JobState) -> list[Happening]:
        member = self._members.get(event.member_id)
        if member is None:
            return []
        before, member.counters = member.counters, event.counters
        is_first = member.restored
        found = self._kept_by(now, member, before)
        if is_first:  # what it did before this coordinator started, the one before has counted
            before = event.counters
        self._add_up(before, event.counters, member.session.position)
        if member.session.standing is Standing.IN_VIEW:
            more = event.counters.operations - before.operations
            self.reports.heard(now, event, member.session, more, was_before=is_first)
            found += self._stall_changed(now, state)
        self._advanced(now, event, member, before, state)
        if self.history.is_due(now):
            self._add_point(now)
        return found

    def _stall_changed(self, now: float, state: JobState) -> list[Happening]:
        stalled_at = self.reports.stalled_at
        goes_on = state.live is not None or state.finished is not None
        text = self.reports.stall_changed(now, state) if goes_on else ""
        if not text:
            return []
        if stalled_at is None:
            return [self._happening("stalled", text)]
        self._stalled += now - max(stalled_at, self._mark)
        return [self._happening("resumed", text)]

    def _add_point(self, now: float) -> None:
        values: dict[str, float] = {
            "step": self.step,
            "operations": self.reports.operations,
            "goodput": self.goodput(now),
        }
        values |= {f"sent_bytes/{kind}": size for kind, size in self._sent_bytes.items()}
        self.history.add(now, values | {f"logged/{name}": value for name, value in self.reports.logged(now).items()})

    def _kept_by(self, now: float, member: _Member, before: Counters) -> list[Happening]:
        """Counts a checkpoint once, with the first member that has written it: each host may write one of that step."""
        counted, was_restored = member.counters, member.restored
        member.restored = False
        if counted.checkpoints <= before.checkpoints or counted.checkpoint_step <= self._kept:
            return []
        self._kept = self.checkpoint_step = counted.checkpoint_step
        if was_restored:  # the coordinator before this one has counted it
            return []
        self.checkpoint_at = now
        seconds = counted.checkpoint_time - before.checkpoint_time
        self.checkpoint.add(seconds := max(0.0, seconds / (counted.checkpoints - before.checkpoints)))
        text = f"checkpoint of step {self.checkpoint_step} is complete, in {seconds:.1f} s"
        return [self._happening("checkpoint", text)]

    def _advanced(self, now: float, event: Heard, member: _Member, before: Counters, state: JobState) -> None:
        """Counts the steps that a heartbeat tells of."""
        if event.counters.undone > before.undone:
            # A step that fails is undone by all members, and ends its generation: it counts once.
            self.undone += self._last_void != self._undone_in
            self._undone_in = self._last_void
        view, progress = state.live, event.progress
        if view is None or view.base is None or member.session.standing is not Standing.IN_VIEW:
            return
        at = min(now, progress.step_at)
        if progress.step <= max(self._word, view.base.step) or at < self._began:
            return
        words = progress.step - max(self._word, view.base.step)
        if self._restored:
            self._restored, self.step = False, progress.step - 1
            self._count(at)
        elif self._word:
            self._count(at, "committed")
        else:  # up to its first word the generation was forming; when that was is not known, if others have followed
            first = max(self._mark, at - (at - self._mark) * (words - 1) / words)
            self._count(first, "reforming")
            self._count(at, "committed")
        self._word, self._use = progress.step, "committed"
        self._reach(now, progress.step - 1)
        if self._recovering is not None and self.step > view.base.step:
            self.recovery.add(at - self._recovering)
            self._recovering = None

    def _notice(self, now: float, event: Event, state: JobState) -> None:
        """Takes note of who has a stream, of arrivals, and of first signs of a loss."""
        if isinstance(event, Registered | Resumed | StreamEnded):
            session = state.sessions.get(event.member_id)
            if session is not None and session.stream is not None:
                self._here[event.member_id] = session
            else:
                self._here.pop(event.member_id, None)
        match event:
            case Registered(member_id) if (session := state.sessions.get(member_id)) is not None:
                self._members[member_id] = _Member(session, now, joins=state.view is not None)
                if self.started is None and len(self._members) == 1:
                    self.started = now
            case StreamEnded(member_id):
                self._suspect(member_id, now)
            case Resumed(member_id):
                self._signs.pop(member_id, None)
            case Reported(_, generation):
                if self._view is not None and self._view.generation == generation:
                    self._signs.setdefault("", now)  # whoever is to blame
            case AddressRefused(member_id) if member_id in self._members:
                if self._members[member_id].session.stream is None:  # else it came back while its address was tried
                    self._suspect(member_id, now)
            case MetOthers(_, met) if met.generation and self._word and self._void is None and met.tag is not None:
                if self._view is not None and met.generation == self._view.generation:
                    # A planned change: the members have stopped after their step.
                    self._count(now, "committed" if met.tag.step >= self._word else "undone")
                    self._word, self._use = 0, "reforming"
                    self._reach(now, met.tag.step)

    def _suspect(self, member_id: str, at: float) -> None:
        member = self._members.get(member_id)
        if member is not None and member.session.standing is Standing.IN_VIEW:
            self._signs.setdefault(member_id, at)

    def _voided(self, now: float, verdict: Verdict) -> list[Happening]:
        self._void, self._last_void = verdict, verdict.generation
        if self._word:
            self._count(now, "undone")
        self._word, self._use = 0, "reforming"
        first = min(self._signs.values(), default=self._last_heard(verdict, now))
        self.detection.add(now - first)
        if self._recovering is None:
            self._recovering = first
        self._signs.clear()
        return [Happening("verdict", verdict.generation, cut(verdict.text))]

    def _last_heard(self, verdict: Verdict, now: float) -> float:
        """When the first culprit was last heard of; nobody else has noticed that it was gone."""
        seats = self._view.seats if self._view is not None else ()
        culprits = (self._members.get(seats[rank].member_id) for rank in verdict.culprits if rank < len(seats))
        return min((member.session.heard for member in culprits if member is not None), default=now)

    def _ended(
        self, now: float, event: Event, member_id: str, ending: Ending | None, state: JobState
    ) -> list[Happening]:
        member = self._members.pop(member_id, None)
        if member is None:
            return []
        self._signs.pop(member_id, None)
        session = member.session
        orderly = isinstance(event, LeftJob) and not event.cause
        if orderly:
            how = "left after a drain" if session.draining else LEFT
        elif isinstance(event, LeftJob):
            how = f"raised {event.cause}"
        else:
            how = ending.how if ending is not None else how_it_went(event)
        if len(self.gone) == MOST_GONE and self.gone[0].loss:
            self._count_loss(self.gone[0], self.gone[0].loss)
        found_gone = isinstance(event, ExitReported) and event.found_gone
        gone = Gone(now, member_id, session, cut(how), found_gone)
        self.gone.append(gone)
        if isinstance(event, ExitReported) and event.output:
            self._keep_output(now, gone, event.output)
        if not orderly and session.last_generation:
            gone.loss = _loss(event, ending)
            if gone.loss in _KNOWN:
                self._count_loss(gone, gone.loss)
        if orderly and state.finished is not None:  # of 1,000 members that go when all is done, nobody wants to read
            return []
        kind = "left" if orderly else "lost"
        return [self._happening(kind, f"{label(session)} {how}", session.last_generation)]

    def _add_up(self, before: Counters, now: Counters, position: int) -> None:
        """Adds to the sums what a member has counted since its last heartbeat. Members choose their numbers.

        A sum that fell would be no counter, and one below 0 no message could say.
        """
        if position == 0:  # all ranks of a replica take the same samples
            self.samples += max(0, now.samples - before.samples)
        self.waited += max(0.0, now.in_collectives - before.in_collectives)
        self.state_bytes += max(0, now.state_bytes - before.state_bytes)
        self.state_time += max(0.0, now.state_time - before.state_time)
        self.checkpoint_failures += max(0, now.checkpoint_failures - before.checkpoint_failures)
        for kind, size in now.sent_bytes.items():
            if len(self._kinds) < MOST_KINDS:
                self._kinds.add(kind)
            self._sent_bytes[kind if kind in self._kinds else "other"] += max(0, size - before.sent_bytes.get(kind, 0))

    def _count_loss(self, gone: Gone, loss: str) -> None:
        self._lost[loss] += 1
        gone.loss = ""

    def _keep_output(self, now: float, gone: Gone, output: str) -> None:
        """Keeps the last lines of the first that end: the others mostly end because of them."""
        for each in self.gone:
            if each.output and each.at < now - KEPT_S:  # it is shown no more
                each.output = ""
        if sum(bool(each.output) for each in self.gone) < _WITH_OUTPUT:
            gone.output = output

    def _amend_by(self, now: float, event: ExitReported) -> list[Happening]:
        """Says how members went of which no more was known than that they were silent, gone, or cut off."""
        found = []
        for gone in self.gone if event.output else ():
            if gone.session.process.is_same(event.process):
                self._keep_output(now, gone, event.output)
        ended = [gone for gone in self.gone if gone.session.process.is_same(event.process)]
        for gone in ended[-1:]:  # a member that was evicted may have come back as another one: then it lived on
            raised = gone.how == LEFT and event.exit_code != 0 and not event.found_gone
            if not (gone.loss or raised or (gone.found_gone and not event.found_gone)):
                continue
            if gone.loss:
                self._count_loss(gone, "exited" if self._is_news(now, gone) else gone.loss)
            self._learn(now, gone, event.how)
            gone.found_gone = event.found_gone
            text = f"{label(gone.session)} {event.how}"
            found.append(self._happening("lost", text, gone.session.last_generation))
        return found

    def _amend(self, now: float, member_id: str, ending: Ending) -> None:
        """Corrects how a member went: it was only silent, and now somebody has seen it end."""
        after = list[Gone]()
        for gone in reversed(self.gone):
            if gone.member_id == member_id and not any(
                each.session.process.is_same(gone.session.process) for each in after
            ):
                self._learn(now, gone, ending.how)  # else it came back as another member, and lived on
            after.append(gone)

    def _is_news(self, now: float, gone: Gone) -> bool:
        """True if the end of a member's process says how the member went; later it is another event."""
        return now <= gone.at + _NEWS_S or gone.how == LEFT

    def _learn(self, now: float, gone: Gone, how: str) -> None:
        """Takes note of how the process of a member that has gone has ended."""
        if self._is_news(now, gone):
            gone.how = cut(how)
        elif not gone.how.endswith(how):
            gone.how = cut(f"{gone.how}; {now - gone.at:.0f} s later its process {how}")

    def _formed(self, now: float, view: View, state: JobState) -> list[Happening]:
        before, self._view = self._view, view
        known = {seat.member_id for seat in before.seats} if before is not None else set()
        new = [seat for seat in view.seats if seat.member_id not in known]
        self._count(now)
        self._began, self._word, self._use, self._restored = now, 0, "reforming", False
        if view.base is not None:
            if before is not None and before.base is not None and view.base.step >= self.step:
                self._reach(now, view.base.step)
            self._kept = min(self._kept, view.base.step)
            self.step = view.base.step  # a line may begin at a checkpoint, further back or ahead
        self.generations[self._why(before, new, view)] += 1
        why = []
        if new and before is not None:
            why.append(f"{named(new, short=True)} joined")
        if before is not None and self._void is None:  # else the verdict says why
            there = {seat.member_id for seat in view.seats}
            gone = [seat for seat in before.seats if seat.member_id not in there]
            # One that waits for another seat has not left: the size of the view may be a multiple of a number.
            if left := [seat for seat in gone if not _waits(state.sessions.get(seat.member_id))]:
                why.append(f"{named(left, short=True)} left")
        self._void = None
        self._signs.clear()
        self.reports.begin(now, {seat.member_id for seat in view.seats})
        for seat in view.seats:
            member = self._members.get(seat.member_id)
            if member is not None and member.joins:
                member.joins = False
                self.join.add(now - member.since)
        found = [Happening("view", view.generation, cut(how_it_began(view, why)))]
        if new:
            found.append(Happening("joined", view.generation, f"{named(new)} joined"))
        return [*found, *self._stall_changed(now, state)]

    def _why(self, before: View | None, new: list[Seat], view: View) -> str:
        if self._void is not None:
            return _REASONS.get(self._void.reason, "other")
        if before is None or before.base is None:
            return "began"
        return "joined" if new else "drained" if len(view.seats) < len(before.seats) else "other"

    def _stand(self, now: float, state: JobState) -> None:
        """Takes note of what the job's time is now, while no view trains."""
        self._live = state.live is not None and state.finished is None
        if self._live:
            return
        self._word = 0
        here = next(iter(self._here.values()), None)
        use: Use | None = "reforming"
        if state.finished is not None or here is None:
            use = None if state.finished is not None or not state.sessions else "waiting"
        elif state.view is None or len(self._here) < here.settings.min_workers * here.settings.replica_size:
            use = "waiting"
        if use != self._use:
            self._count(now)
            self._use = use

    def _count(self, until: float, use: Use | None = None) -> None:
        """Counts the seconds since the last ones that were counted, as what is given or as what they are by now."""
        use = use or self._use
        if until > self._mark:
            if use is not None:
                stalled = min(self._stalled, until - self._mark)
                self._seconds["waiting"] += stalled
                self._seconds[use] += until - self._mark - stalled
            self._mark, self._stalled = until, 0.0

    def _reach(self, now: float, step: int) -> None:
        if step > self.step:
            self.committed += step - self.step
            self.step = step
            self._speed.reach(now, self.committed)

    def _happening(self, kind: str, text: str, generation: int | None = None) -> Happening:
        now_in = self._view.generation if self._view is not None else 0
        return Happening(kind, now_in if generation is None else generation, cut(text))


def _waits(session: Session | None) -> bool:
    return session is not None and session.standing is Standing.CANDIDATE and not session.draining


def _loss(event: Event, ending: Ending | None) -> str:
    match event:
        case LeftJob():
            return "raised"
        case ExitReported():
            return "exited"
        case AddressRefused():
            return "refused"
        case Registered():
            return "replaced"
    return "silent" if ending is not None and ending.how.startswith("was silent") else "evicted"
