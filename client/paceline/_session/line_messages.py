"""Messages about a training line between a member's training thread and the coordinator.

The coordinator's messages arrive on the event loop and wait in the `MemberInbox` until the training thread reads them;
nothing is decided here. Requests to stop (`summoned`, `draining`) are plain values that the training thread reads when
it begins a step. What the training thread says about a meeting and about the end is sent again after a reconnect, since
messages are lost if the stream breaks.
"""

from __future__ import annotations

import functools
import logging
import queue
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline import errors
from paceline._base.rpc import aio
from paceline._base.waits import LoopThread
from paceline._links.base import Mesh, Peer
from paceline._session.control import ControlStream
from paceline._session.identity import is_gone
from paceline._session.view import MemberLists, read_peer
from paceline.config import Config
from paceline_protocol import WHOLE, Share, Tag
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub


@dataclass(frozen=True, slots=True)
class ViewCame:
    """Says that a view has formed with this member.

    Attributes:
        generation: its number.
        rank: this member's rank.
        base: the state that it starts from; None if its members have yet to compare their states.
        newcomers: ranks that do not hold that state.
        mesh: the links to its members; None if the member list could no longer be fetched.
        member_id: this worker's member id in the view; it may have a new one since.
        lost: a sentence about steps that were trained before and are lost; empty if there are none.
    """

    generation: int
    rank: int
    base: Tag | None
    newcomers: frozenset[int]
    mesh: Mesh | None
    member_id: str
    lost: str = ""


@dataclass(frozen=True, slots=True)
class CatchUpAsked:
    """Orders this member, which lags behind, to take a state from the members that hold it.

    Attributes:
        generation: the generation that the meeting follows.
        base: tag of the state.
        holders: the members that hold it, with their shares of it.
        share: the share to take of a sharded state.
        fingerprint: fingerprint of the whole state, where the tag alone does not identify it.
    """

    generation: int
    base: Tag
    holders: Sequence[tuple[Peer, tuple[Share, ...]]]
    share: Share
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class ManifestMismatch:
    """Says that this member trains something else than the line; `donor` has the line's manifest."""

    donor: Peer


@dataclass(frozen=True, slots=True)
class MayGo:
    """Lets this member leave, as it asked. `last`: no other member goes on."""

    last: bool


@dataclass(frozen=True, slots=True)
class NoSeat:
    """Says that the next view has no place for this member, which becomes a candidate."""

    reason: str


@dataclass(frozen=True, slots=True)
class StateGone:
    """Says that parts of the sharded state are lost, so that this member's shard is useless."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobDone:
    """Says that the job is done, with its last step."""

    step: int


@dataclass(frozen=True, slots=True)
class CaughtOut:
    """Says that this member's session had ended unnoticed, and that it has a new one, as a newcomer."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Says that training runs without this worker.

    Attributes:
        generation: its latest generation.
        members: its members that have not ended; None until the list has been fetched.
    """

    generation: int
    members: Sequence[Peer] | None


@dataclass(frozen=True, slots=True)
class ReachResult:
    """The result of testing whether this worker and the members of a line can connect.

    Attributes:
        members: the members that were tested.
        troubles: one text for each member that cannot connect to this worker, or the other way round, with the reason.
    """

    members: Sequence[Peer]
    troubles: list[str]


@dataclass(frozen=True, slots=True)
class Waits:
    """Says what the coordinator waits for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Says that the session is over for good, or that this member cannot go on."""

    error: BaseException


News: TypeAlias = Runs | ReachResult | Waits
"""Messages that only inform, and ask this member for nothing."""

LineMessage: TypeAlias = (
    ViewCame | CatchUpAsked | ManifestMismatch | MayGo | NoSeat | StateGone | JobDone | CaughtOut | Lost | News
)


class MemberInbox:
    """The messages of one session.

    Attributes:
        summoned: generation in which this member is to ask for a meeting, 0 for none.
        draining: why this member should leave; empty if it should not.
        connected: False while the coordinator cannot be reached.
        done: the job's last step once it is done; None until then.
    """

    def __init__(self) -> None:
        self.summoned = 0
        self.done: int | None = None
        self.draining = ""
        self.connected = True
        self._messages: queue.SimpleQueue[LineMessage] = queue.SimpleQueue()
        self._put = self._got = 0  # counts of messages that ask for something; each is written by one thread

    def put(self, message: LineMessage) -> None:
        """Adds a message; on the loop, or from any thread if it says that the session is over."""
        self._put += not isinstance(message, News)
        self._messages.put(message)

    @property
    def asks(self) -> bool:
        """True if there is an unread message that is not merely news."""
        return self._put != self._got

    def get(self, timeout: float) -> LineMessage | None:
        """Returns the next message; None if none came within `timeout` seconds."""
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        self._got += not isinstance(message, News)
        return message


_log = logging.getLogger("paceline.session")


class LineClient:
    """Connects one member's training thread with the coordinator, for everything that concerns the line.

    Args:
        job: name of the job.
        config: timeouts.
        thread: the loop.
        inbox: receives the coordinator's messages.
        start: starts a coroutine on the loop that ends with the session.
        stand_by: makes `join` return without a view; called with the reason.

    Attributes:
        control: the stream; set once there is one.
        members: the member lists of this session's views.
        step: the last step whose word has completed in this generation, for heartbeats; 0 for none.
        step_at: monotonic time at which it completed.
        went_on: True if this member went on without a meeting, and does not yet know whether the others did.
        on_first_commit: called on the training thread when a generation has committed its first step.
    """

    control: ControlStream

    def __init__(
        self,
        job: str,
        config: Config,
        thread: LoopThread,
        inbox: MemberInbox,
        start: Callable[[Coroutine[Any, Any, None]], None],
        stand_by: Callable[[str], None],
    ) -> None:
        self.members = MemberLists()
        self.step, self.step_at = 0, 0.0
        self.went_on = False
        self._words = 0  # of this generation
        self.on_first_commit: Callable[[], None] = lambda: None
        self._job = job
        self._config = config
        self._thread = thread
        self._inbox = inbox
        self._start = start
        self._stand_by = stand_by
        self._meet: pb.SessionRequest | None = None  # the last message about a meeting, until a view has formed
        self._finish: pb.SessionRequest | None = None
        self._running: pb.Running | None = None  # the last message about a line that runs without this worker

    # For the training thread.

    def meet(self, meet: pb.Meet) -> None:
        """Tells the coordinator that this member has stopped; repeated after a reconnect until a view has formed."""
        request = pb.SessionRequest(meet=meet)

        def send() -> None:
            if meet.generation in (0, self.control.generation):
                self._meet = request
                self.control.send(request)
            else:
                # The worker is another member now, or has been given a later view: a message says so.
                text = (
                    "did not report the stop in generation %d to the coordinator: this worker is in generation %d now"
                )
                _log.info(text, meet.generation, self.control.generation)

        self._thread.loop.call_soon_threadsafe(send)

    def go_on(self) -> None:
        """Stops repeating the last `meet`, because the generation goes on without the meeting."""
        self.went_on = True
        self._thread.loop.call_soon_threadsafe(self.forget_meeting)

    def finish(self, generation: int, step: int) -> None:
        """Tells the coordinator that all steps are done; repeated after a reconnect."""
        request = pb.SessionRequest(finish=pb.Finish(generation=generation, step=step))

        def send() -> None:
            self._finish = request
            self.control.send(request)

        self._thread.loop.call_soon_threadsafe(send)

    def word_completed(self, step: int) -> None:
        """Notes for heartbeats that the word of this step has completed: every member has entered it."""
        self.step_at = time.monotonic()
        self.step = step
        self.went_on = False  # all others have entered it too
        self._words += 1
        if self._words == 2:
            self.on_first_commit()

    def generation_began(self) -> None:
        """Resets the step at the beginning of a generation, in which no word has completed yet."""
        self.step = self._words = 0
        self.went_on = False

    # On the loop.

    def forget_meeting(self) -> None:
        """Stops repeating the last `meet`, because the meeting is over or will not happen."""
        self._meet = self._running = None

    def say_again(self) -> None:
        """Repeats messages that may have been lost with the old stream."""
        self.control.send_again([said for said in (self._meet, self._finish) if said is not None])

    def hear(self, message: pb.SessionResponse) -> None:
        """Handles a message of the coordinator about the line; see `ControlListener.on_line`."""
        match message.WhichOneof("event"):
            case "running":
                text = (
                    f"this worker is in no view yet: job {self._job!r} is running with {message.running.world_size} "
                    "members, and this worker enters at its first step of session.steps()"
                )
                self._running = message.running
                self._start(self._learn_members(message.running))
                self._stand_by(text)
            case "summons":
                self._inbox.summoned = message.summons.generation
            case "catch_up":
                order = message.catch_up
                base = Tag(order.base.generation, order.base.step)
                holders = [(read_peer(each.member), tuple(map(_share, each.shares))) for each in order.holders]
                share = _share(order.share) if order.HasField("share") else WHOLE
                self._inbox.put(CatchUpAsked(order.generation, base, holders, share, order.fingerprint))
            case "mismatch":
                self._inbox.put(ManifestMismatch(read_peer(message.mismatch.donor)))
            case "drain":
                self._inbox.draining = message.drain.reason or "it was drained on request"
            case "dismissed":
                self._inbox.put(MayGo(message.dismissed.last))
            case "spare":
                self._inbox.put(NoSeat(message.spare.reason))
            case "state_lost":
                self._inbox.put(StateGone(message.state_lost.reason))
            case "missing":
                gone = [process for process in message.missing.processes if is_gone(process)]
                if gone:
                    self._start(self._report_gone(gone))
            case "finished":
                self._finish = None
                self._inbox.done = message.finished.step
                self._inbox.put(JobDone(message.finished.step))
                self._stand_by(f"job {self._job!r} is done: its last step was {message.finished.step}")

    async def _report_gone(self, processes: list[pb.ProcessIdentity]) -> None:
        """Reports silent members whose processes on this host have ended, so that nobody waits for them."""
        for process in processes:
            _log.info("the worker with pid %d of job %r no longer runs on this host", process.pid, self._job)
            request = pb.ReportExitRequest(job=self._job, process=process, found_gone=True)
            report = functools.partial(_report_exit, request, self._config.call_timeout)
            try:
                await self.control.channel.call(report)
            except aio.AioRpcError as error:  # the coordinator asks again
                _log.warning("could not tell the coordinator that pid %d has ended: %s", process.pid, error.details())

    async def _learn_members(self, running: pb.Running) -> None:
        """Tells the training thread which members of the line it must reach: those that have not ended."""
        self._inbox.put(Runs(running.generation, None))
        view = pb.ViewFormed(
            generation=running.generation,
            world_size=running.world_size,
            members_sha256=running.members_sha256,
            pages=running.pages,
        )
        while running is self._running:  # otherwise a newer message has come, and its answer is on the way
            try:
                peers = await self.members.fetch(self.control.channel, self._job, view, self._config.call_timeout)
            except errors.PacelineError as error:
                _log.info("could not fetch the members of generation %d: %s", view.generation, error)
                if isinstance(error, errors.StaleGeneration):  # a message about the newer one will come
                    return
            else:
                if running is self._running:
                    self._inbox.put(
                        Runs(running.generation, [peer for peer in peers if peer.rank not in running.ended])
                    )
                return


def _share(message: pb.Share) -> Share:
    return Share(message.part, message.parts)


def _report_exit(request: pb.ReportExitRequest, timeout: float, channel: aio.Channel) -> Awaitable[object]:
    return SessionServiceStub(channel).ReportExit(request, timeout=timeout, wait_for_ready=True)
