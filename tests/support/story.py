"""Plays a story through the pure protocol: one coordinator's `Membership`, and a `MemberState` for each worker.

A story is a text. The lines that begin with `t=` say what happens from outside, in the words of `_INPUTS`; the indented
lines below each say what the protocol does then. `play` keeps comments and inputs, and writes everything else anew.

Messages arrive at once and in order, and a view is durable as soon as it is stored. Heartbeats are sent and not shown,
nor are `Welcome` and `Waiting`: the sentence after `decides` is what waiting workers are told.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline_protocol import (
    OURS,
    Ending,
    JobSettings,
    Meet,
    MemberState,
    MemberView,
    Phase,
    Process,
    Progress,
    ProtocolSettings,
    Report,
    Share,
    StepFlag,
    Tag,
    Take,
    Verdict,
    View,
    agrees,
    flags_of,
    lane,
    rank_name,
    share_of,
    step_word,
)
from paceline_protocol.coordinator import (
    AskDoor,
    DoorAnswered,
    DrainAsked,
    Effect,
    EndSession,
    Event,
    ExitReported,
    FinishedLine,
    FinishStored,
    ForgetView,
    Heard,
    JobState,
    LeftJob,
    Membership,
    MetOthers,
    Refused,
    Registered,
    ReplicaLost,
    Reported,
    RestartAsked,
    Resumed,
    Send,
    StoreEnding,
    StoreFinished,
    StoreReached,
    StoreVerdict,
    StoreView,
    StreamEnded,
    Ticked,
    ViewStored,
    Welcome,
    restore,
)
from paceline_protocol.messages import (
    CatchUp,
    Dismissed,
    Drain,
    Finished,
    Message,
    Mismatch,
    Missing,
    Running,
    Spare,
    StateLost,
    Summons,
    ViewFormed,
    Waiting,
)
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["play"]

_MARGIN = " " * 10


@dataclass(slots=True, eq=False)
class Worker:
    """One process."""

    host: str
    process: Process
    state: MemberState
    settings: JobSettings
    manifest: bytes = b"script"
    member_id: str = ""
    joins: int = 0
    """How often it has registered."""
    generation: int = 0
    """Of the last view that it has heard of."""
    stream: int | None = None
    awake: bool = True
    busy: bool = False
    """A call into C keeps its interpreter busy: it is not awake, and its door answers."""
    alive: bool = True
    draining: str = ""
    summoned: bool = False
    step: int = 0
    """The last step whose word has completed in its generation."""
    step_at: float = 0.0
    """When it did."""
    unread: list[Message] = field(default_factory=list)
    """What has come while it was frozen."""

    @property
    def trains(self) -> bool:
        """True if it is inside a step."""
        return self.alive and self.state.phase is Phase.STEPPING


@dataclass(slots=True)
class Disk:
    """What the coordinator has stored."""

    generation: int = 0
    view: View | None = None
    verdict: Verdict | None = None
    endings: dict[int, Ending] = field(default_factory=dict)
    finished: int | None = None
    reached: int | None = None


def play(text: str) -> str:
    """The story, with everything that the protocol does written anew.

    Raises:
        ValueError: a line is no input.
    """
    story = _Story()
    for number, row in enumerate(text.splitlines(), 1):
        if row.startswith("#") or not row.strip():
            story.lines.append(row.rstrip())
        elif row.startswith("job:"):
            story.lines.append(row.rstrip())
            story.begin(row)
        elif row.startswith("t=") and "time passes" not in row:
            try:
                story.happens(row.rstrip())
            except KeyError as error:
                raise ValueError(f"line {number}: there is no worker {error}: {row}") from error
    return "\n".join(story.lines) + "\n"


class _Story:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.by_id: dict[str, Worker] = {}
        self.disk = Disk()
        self.checkpoint: Tag | None = None
        self.up = True
        self._streams = 0
        self._starts: Counter[str] = Counter()
        self._reason = ""
        self._queue: deque[Callable[[], None]] = deque()
        self._settings = JobSettings(1, 4, 3.0)
        self._node_size = 1
        self.job = Membership(JobState("digits"), ProtocolSettings())

    # Writing ----------------------------------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """A line about what follows from the last input."""
        self.lines.append(_MARGIN + text)

    def _stamp(self, text: str) -> str:
        return f"t={self.now:<6.2f}  {text}"

    # What happens -----------------------------------------------------------------------------------------------------

    def begin(self, line: str) -> None:
        """The settings of the job."""
        found = re.fullmatch(
            r"job: (\d+) to (\d+) (?:workers|replicas of (\d+) workers), failure timeout ([\d.]+) s"
            r"(, the state is sharded over all)?",
            line.rstrip(),
        )
        if found is None:
            raise ValueError(f"no job: {line}")
        self._settings = JobSettings(int(found[1]), int(found[2]), float(found[4]), replica_size=int(found[3] or 1))
        self._node_size = 1 if found[5] is None else 0

    def happens(self, line: str) -> None:
        """One line of input: time passes until then, and then it happens."""
        found = re.match(r"t=([\d.]+)\s+(.*)", line)
        assert found is not None, line
        self._pass_time(float(found[1]))
        self.lines.append(self._stamp(found[2]))
        for pattern, name in _INPUTS:
            if (match := re.fullmatch(pattern, found[2])) is not None:
                getattr(self, name)(*(group for group in match.groups() if group is not None))
                self._run()
                return
        raise ValueError(f"nobody knows what this means: {line}")

    def _pass_time(self, until: float) -> None:
        while self.up and (due := max(self.now, self.job.next_deadline())) <= until:
            self.now = due
            before = len(self.lines)
            self._tell(Ticked())
            self._run()
            if len(self.lines) > before:
                self.lines.insert(before, self._stamp("time passes"))
        self.now = until

    def _run(self) -> None:
        while self._queue:
            self._queue.popleft()()

    # The coordinator --------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Gives an event to the coordinator, and hands on what it does about it."""
        if not self.up:
            return
        for worker in self.workers.values():
            session = self.job.state.sessions.get(worker.member_id)
            if session is not None and session.stream is not None and worker.alive and worker.awake:
                self.job.handle(self.now, Heard(worker.member_id, Progress(0, 0.0, False, worker.step, worker.step_at)))
        try:
            effects = self.job.handle(self.now, event)
        except Refused as refused:
            self.write(f"refuses ({type(refused).__name__}): {refused}")
            return
        self._perform(effects)
        self._write_decision()

    def _write_decision(self) -> None:
        if self.job.decision.reason != self._reason:
            self._reason = self.job.decision.reason
            self.write(f"decides: {self._reason}")

    def _perform(self, effects: list[Effect]) -> None:
        for text, same in itertools.groupby(effects, _describe):
            if text is not None:
                alike = [effect for effect in same if isinstance(effect, Send)]
                to = [self.by_id[effect.member_id].host for effect in alike]
                if isinstance(alike[0].message, Running | Summons | CatchUp | Mismatch | Missing):
                    self._write_decision()  # it is the reason for these
                self.write(f"coordinator -> {', '.join(to)}: {text}")
                self._queue += [
                    functools.partial(self._receive, self.by_id[each.member_id], each.message) for each in alike
                ]
                continue
            for effect in same:
                if isinstance(effect, StoreView):
                    self._write_decision()
                self._keep(effect)

    def _keep(self, effect: Effect) -> None:
        disk = self.disk
        match effect:
            case StoreView(view):
                disk.view, disk.verdict, disk.endings, disk.generation = view, None, {}, view.generation
                if view.base is not None:
                    disk.reached = view.base.step
                members = ", ".join(
                    f"{rank_name(seat.rank, seat.replica_size)} {seat.process.host}"
                    f"{' (newcomer)' if seat.rank in view.newcomers else ''}"
                    for seat in view.seats
                )
                base = (
                    "its members have yet to compare their states" if view.base is None else f"base {_name(view.base)}"
                )
                self.write(f"stores generation {view.generation}: {members}; {base}")
                self._queue.append(lambda: self._tell(ViewStored(view.generation)))
            case ForgetView(generation):
                disk.view, disk.verdict, disk.endings = None, None, {}
                self.write(f"forgets the view of generation {generation}")
            case StoreEnding(generation, rank, ending):
                disk.endings[rank] = ending
                sure = "" if ending.sure else ", and may be alive"
                name = rank_name(rank, self._settings.replica_size)
                self.write(f"stores that {name} of generation {generation} {ending.how}{sure}")
            case StoreVerdict(verdict):
                disk.verdict = verdict
                self.write(f"stores that generation {verdict.generation} is void")
            case StoreFinished(step):
                disk.finished = step
                self.write(f"stores that the job is {f'done after step {step}' if step is not None else 'not done'}")
                if step is not None:
                    self._queue.append(functools.partial(self._tell, FinishStored(step)))
            case StoreReached(step):
                disk.reached = step
            case EndSession(member_id, refusal):
                worker = self.by_id[member_id]
                if refusal is not None:
                    self.write(f"ends the session of {worker.host}: {refusal}")
                if worker.member_id == member_id:
                    worker.stream = None
                    worker.alive &= not isinstance(refusal, ReplicaLost)
            case AskDoor(member_id):
                worker = self.by_id[member_id]
                self.write(f"asks the door of {worker.host} whether its process runs")
                if worker.alive and (worker.awake or worker.busy):
                    self._queue.append(functools.partial(self._tell, DoorAnswered(member_id)))
            case Welcome() | Send(_, Waiting()):
                pass  # not shown
            case _:
                raise AssertionError(f"what is {effect}?")

    # Workers ----------------------------------------------------------------------------------------------------------

    def _receive(self, worker: Worker, message: Message) -> None:
        if not worker.alive:
            return
        if not worker.awake:
            worker.unread.append(message)
            return
        match message:
            case ViewFormed(View() as view):
                self._enter(worker, view, message)
            case Verdict(generation):
                if worker.state.phase is Phase.STEPPING and generation == worker.state.generation:
                    self.write(f"{worker.host} undoes step {self._next_step(worker)}")
                    self._say(worker, worker.state.meet())
            case Running():
                if worker.state.generation == 0 and worker.state.phase is Phase.MEETING:
                    self.write(f"{worker.host} connects to all members")
                    self._say(worker, worker.state.meet())
            case CatchUp(generation, base, donors, share):
                own = any(seat.member_id == worker.member_id for seat, _ in donors)
                order = worker.state.catch_up(generation, base, share or Share(0, 1), own=own)
                self._carry_out(worker, order, [seat.process.host for seat, _ in donors])
            case Summons():
                worker.summoned = True
            case Drain(reason):
                worker.draining = reason
            case Dismissed(last):
                if last and worker.state.held is not None:
                    self.write(f"{worker.host} writes a checkpoint of step {worker.state.held.step}")
                self._leave(worker)
            case Finished():
                self._leave(worker)
            case Spare():
                self._say(worker, worker.state.cast_out())
            case StateLost():
                if self.checkpoint is None:
                    self.write(f"{worker.host} has no checkpoint, and exits")
                    self._leave(worker)
                else:
                    self._say(worker, worker.state.lost(self.checkpoint))
            case Mismatch():
                self.write(f"{worker.host} compares the two, and leaves with the difference as its error")
                self._leave(worker)

    def _enter(self, worker: Worker, view: View, message: ViewFormed) -> None:
        worker.generation, worker.step = view.generation, 0
        if worker.state.generation == 0 and worker.state.held == Tag(0, 0) and self._node_size != 1:
            worker.state.shares = (share_of(message.rank, len(view.seats), self._node_size),)
        seats, newcomers = list(lane(view, message.position)), frozenset(message.newcomers)
        news = MemberView(view.generation, message.rank, view.base, newcomers, len(seats))
        donors = [seat.process.host for seat in seats if seat.rank not in newcomers]
        self._carry_out(worker, worker.state.formed(news), donors)

    def _carry_out(self, worker: Worker, order: Meet | Take | None, donors: list[str]) -> None:
        if isinstance(order, Take):
            part = "" if order.share.parts == 1 else f"part {order.share.part} of {order.share.parts} of "
            whence = " or ".join(host for host in donors if host != worker.host) or "its checkpoint"
            whence = "its checkpoint" if worker.state.stored else whence
            self.write(f"{worker.host} takes {part}the state of step {order.base.step} from {whence}")
            order = worker.state.took()
        if order is not None:
            self._say(worker, order)
        elif worker.state.phase is Phase.READY:
            self._queue.append(lambda: self._begin_step(worker))

    def _begin_step(self, worker: Worker) -> None:
        if worker.state.phase is Phase.READY and worker.state.generation == worker.generation:
            worker.state.begin()

    def _say(self, worker: Worker, meet: Meet) -> None:
        fingerprint = b"built" if meet.tag == Tag(0, 0) else b""
        meet = _filled(meet, fingerprint, worker.manifest)
        self._queue.append(lambda: self._meet(worker, meet))

    def _meet(self, worker: Worker, meet: Meet) -> None:
        self.write(f"{worker.host} -> coordinator: {_describe_meet(meet)}")
        self._tell(MetOthers(worker.member_id, meet))

    def _leave(self, worker: Worker) -> None:
        worker.alive = False
        self.write(f"{worker.host} -> coordinator: leave")
        self._queue.append(lambda: self._tell(LeftJob(worker.member_id, "")))

    def _next_step(self, worker: Worker) -> int:
        return worker.state.held.step + 1 if worker.state.held is not None else 1

    # Inputs -----------------------------------------------------------------------------------------------------------

    def joins(self, host: str, *but: str) -> None:
        """A worker registers; a former member with its state, and another one with one that it has built."""
        settings, manifest = self._settings, b"script"
        for word in but:
            if word.endswith("another script"):
                manifest = b"another"
            elif (found := re.search(r"(\d+) to (\d+) workers", word)) is not None:
                settings = JobSettings(int(found[1]), int(found[2]), self._settings.failure_timeout)
        worker = self.workers.get(host)
        former = ""
        if worker is None or not worker.alive:
            pid = 101 + len(self.by_id)
            state = MemberState(Tag(0, 0), self._node_size)
            self._starts[host] += 1
            worker = self.workers[host] = Worker(host, Process(host, pid), state, settings, manifest)
        else:
            former = worker.member_id
        worker.joins += 1
        in_replica = self._settings.replica_size > 1  # "host-b1" is the rank at position 1 of a replica
        worker.member_id = f"{host}, the {worker.joins}."
        self._streams += 1
        worker.stream = self._streams
        self.by_id[worker.member_id] = worker
        event = Registered(
            worker.member_id,
            worker.member_id.encode(),
            worker.stream,
            worker.process,
            f"{host}:7401",
            settings,
            None,
            worker.generation,
            OURS,
            former,
            former.encode(),
            f"{host[:-1]}, the {self._starts[host]}." if in_replica else "",
            int(host[-1]) if in_replica else 0,
        )
        self._tell(event)
        if former:
            meet = worker.state.cast_out()
            if not meet.unproven:
                return
            self._say(worker, meet)

    def train(self, hosts: str, step: str) -> None:
        """These have been training for a while: their story up to here is that of `join.txt`."""
        lines, self.lines = self.lines, []
        now, self.now = self.now, self.now - 1.0
        for host in hosts.split(", "):
            self.joins(host)
        self._pass_time(now)
        self.commits("1", step)
        self.lines = lines

    def commits(self, first: str, last: str = "") -> None:
        """Steps whose words complete and that are applied by all members, until one of them is asked to meet."""
        for step in range(int(first), int(last or first) + 1):
            members = [worker for worker in self.workers.values() if worker.trains and worker.awake]
            assert {self._next_step(worker) for worker in members} == {step}, [w.state.held for w in members]
            words = [step_word(self._flags(worker), step, 7) for worker in members]
            sums = [sum(numbers) for numbers in zip(*words, strict=True)]
            assert agrees(sums, len(members))
            flags = flags_of(sums)
            for worker in members:
                worker.step, worker.step_at = step, self.now
                worker.state.all_began()
                worker.state.applied(step)
            if flags:
                asked = " and ".join(str(flag.name).lower() for flag in flags)
                self.write(f"the word of step {step} asks all to meet after it ({asked})")
                for worker in members:
                    worker.state.leaving, worker.summoned = bool(worker.draining), False
                    self._say(worker, worker.state.meet())
            else:
                for worker in members:
                    worker.state.begin()
            self._run()

    def _flags(self, worker: Worker) -> StepFlag:
        leave = StepFlag.LEAVE if worker.draining and worker.stream is not None else StepFlag(0)
        return leave | (StepFlag.JOIN if worker.summoned else StepFlag(0))

    def alone_applies(self, host: str, step: str) -> None:
        """The word of this step has completed at one member only, and it has applied the step."""
        worker = self.workers[host]
        worker.state.applied(int(step))
        worker.step, worker.step_at = int(step), self.now
        worker.state.begin()

    def is_killed(self, host: str) -> None:
        """The process is gone, and its stream with it."""
        worker = self.workers[host]
        worker.alive = False
        if worker.stream is not None:
            self._tell(StreamEnded(worker.member_id, worker.stream))

    def exited(self, host: str, signal: str) -> None:
        """Its launcher has seen the process end."""
        self._tell(ExitReported(self.workers[host].process, -int(signal)))

    def lost(self, host: str, rank: str, how: str) -> None:
        """A link of this member has ended."""
        worker = self.workers[host]
        report = Report(-1, ErrorReason.ERROR_REASON_PEER_LOST, int(rank), 0, how)
        self._tell(Reported(worker.member_id, worker.state.generation, report))

    def freezes(self, host: str) -> None:
        """The process stops, its stream stays."""
        self.workers[host].awake = False

    def is_busy(self, host: str) -> None:
        """A call into C keeps the interpreter busy: no Python runs, and the door answers."""
        self.workers[host].awake, self.workers[host].busy = False, True

    def wakes_up(self, host: str) -> None:
        """It reads what has come meanwhile."""
        worker = self.workers[host]
        worker.awake, worker.busy = True, False
        unread, worker.unread = worker.unread, []
        for message in unread:
            if isinstance(message, Verdict):  # its session has ended with it: it says no more
                self.write(f"{host} undoes step {self._next_step(worker)}")

    def drains(self, host: str, reason: str) -> None:
        """An operator wants this member to leave."""
        self._tell(DrainAsked((self.workers[host].member_id,), reason))

    def coordinator_is_killed(self) -> None:
        """Everything is gone but what was stored."""
        self.up = False
        for worker in self.workers.values():
            worker.stream = None

    def coordinator_starts(self) -> None:
        """It takes up what was stored."""
        disk, self.up, self._reason = self.disk, True, ""
        state = restore(
            self.now,
            "digits",
            generation=disk.generation,
            view=disk.view,
            verdict=disk.verdict,
            endings=disk.endings,
            finished=disk.finished,
            reached=disk.reached,
        )
        self.job = Membership(state, ProtocolSettings())
        self._tell(Ticked())

    def resumes(self, host: str) -> None:
        """A member takes its session up again, on a new stream."""
        worker = self.workers[host]
        self._streams += 1
        worker.stream = self._streams
        self._tell(Resumed(worker.member_id, worker.member_id.encode(), worker.stream, worker.generation, OURS))

    def restarts(self) -> None:
        """An operator says that the members of the last generation are dead."""
        self._tell(RestartAsked())

    def finishes(self, host: str) -> None:
        """A member has seen the closing word complete."""
        worker = self.workers[host]
        assert worker.state.held is not None
        self._tell(FinishedLine(worker.member_id, worker.state.generation, worker.state.held.step))

    def writes_checkpoint(self, step: str) -> None:
        """All members have written one."""
        held = next(worker.state.held for worker in self.workers.values() if worker.trains)
        assert held is not None
        assert held.step == int(step)
        self.checkpoint = held

    def nothing(self) -> None:
        """Only time passes."""


_INPUTS = (
    (r"(\S+) joins(?:, (.*))?", "joins"),
    (r"(\S+(?:, \S+)*) train; step (\d+) is committed", "train"),
    (r"step (\d+) commits", "commits"),
    (r"steps (\d+) to (\d+) commit", "commits"),
    (r"(\S+) alone applies step (\d+)", "alone_applies"),
    (r"(\S+) is killed(?:, in step \d+)?", "is_killed"),
    (r"the launcher of (\S+) -> coordinator: its worker was killed by signal (\d+)", "exited"),
    (r"(\S+) -> coordinator: lost rank (\d+) \((.*)\)", "lost"),
    (r"(\S+) freezes(?:, in step \d+)?", "freezes"),
    (r"(\S+) enters a long call into C(?:, in step \d+)?", "is_busy"),
    (r"(\S+) wakes up", "wakes_up"),
    (r"(\S+) returns from it", "wakes_up"),
    (r"an operator drains (\S+) \((.*)\)", "drains"),
    (r"the coordinator is killed", "coordinator_is_killed"),
    (r"the coordinator starts again", "coordinator_starts"),
    (r"(\S+) resumes its session", "resumes"),
    (r"an operator restarts the job", "restarts"),
    (r"(\S+) -> coordinator: the last step is committed", "finishes"),
    (r"all members have written a checkpoint of step (\d+)", "writes_checkpoint"),
    (r"nothing happens", "nothing"),
)
"""What may happen, as patterns of text, with the method that makes it so."""


def _filled(meet: Meet, fingerprint: bytes, manifest: bytes) -> Meet:
    return replace(meet, fingerprint=fingerprint, manifest=manifest, step_timeout=600.0)


def _name(tag: Tag) -> str:
    return f"step {tag.step}" + (f" (generation {tag.generation})" if tag.generation else "")


def _describe_meet(meet: Meet) -> str:
    where = f"stopped in generation {meet.generation}" if meet.generation else "ready to come in"
    if meet.tag is None:
        text = f"meet: {where}, holds no state"
    elif meet.stored:
        text = f"meet: {where}, can read {_name(meet.tag)} from a checkpoint"
    else:
        text = f"meet: {where}, holds {_parts(meet.shares)}{_name(meet.tag)}"
    return text + (", wants to leave" if meet.leaving else "")


def _parts(shares: tuple[Share, ...]) -> str:
    cut = [f"part {share.part} of {share.parts}" for share in shares if share.parts > 1]
    return f"{' and '.join(cut)} of " if cut else ""


def _describe(effect: Effect) -> str | None:
    """The message that an effect is, None if it is none or of no interest."""
    match effect.message if isinstance(effect, Send) else None:
        case ViewFormed(view):
            return f"view: generation {view.generation} has formed"
        case Verdict(text=text):
            return f"verdict: {text}"
        case Running(view):
            return f"running: generation {view.generation} trains without you"
        case Summons(generation):
            return f"summons: ask the others of generation {generation} to meet"
        case CatchUp(_, base, donors, share):
            what = f"part {share.part} of {share.parts} of {_name(base)}" if share is not None else _name(base)
            whence = " or ".join(seat.process.host for seat, _ in donors) or "the checkpoint"
            return f"catch up: take {what} from {whence}"
        case Mismatch(donor):
            return f"mismatch: your script or state differs from that of {donor.process.host}"
        case Missing(processes):
            return f"missing: is pid {processes[0].pid} still there?"
        case Drain(reason):
            return f"drain: leave after this step ({reason})"
        case Dismissed(last):
            return f"dismissed: you may go{', as do all others' if last else ''}"
        case Spare():
            return "spare: no seat for you yet"
        case StateLost(reason):
            return f"state lost: {reason}"
        case Finished(step):
            return f"finished: the job is done after step {step}"
        case _:
            return None
