"""A member's connection to its job: control stream, front door, mesh and group, wired together.

The coordinator's messages arrive here on the loop thread; the user's calls wait here on the user's own thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from dataclasses import replace
from typing import Any, TypeVar

from paceline import errors
from paceline._base.activity import counted_since
from paceline._base.addresses import CoordinatorAddresses, is_exhausted, parse_endpoint
from paceline._base.proofs import DoorKey
from paceline._base.waits import LoopThread, Outcome
from paceline._group import Group
from paceline._links.fault import Suspicion, error_of
from paceline._links.grpc_door import Door
from paceline._links.grpc_knock import Knocker
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.grpc_state import StateSource
from paceline._links.nowhere import NoMesh
from paceline._session.answers import answer_question, whole_record
from paceline._session.barrier import Barriers
from paceline._session.control import ControlStream, heartbeat
from paceline._session.flight import FlightLog, flight_directory
from paceline._session.generations import Generations
from paceline._session.identity import JoinRequest
from paceline._session.inbox import MemberInbox, SessionOver, SessionReplaced, ViewLinked
from paceline._session.launcher_pipe import tell_launcher
from paceline._session.line_client import LineClient
from paceline._session.stack_file import JobMark, keep_stack_file
from paceline._session.store import CoordinatorStore
from paceline._session.whereabouts import Sockets, Whereabouts
from paceline.config import Config, checked_timeout
from paceline.credentials import Credentials
from paceline_protocol import Counters, Verdict
from paceline_protocol.messages import BarrierFailed, BarrierPassed, Message, ViewFormed, Waiting
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1 import store_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.session")

T = TypeVar("T")

_PATIENT = 1.0
"""Seconds to wait for a view before the user is told; most views form sooner."""

CLOSE_TIMEOUT = 2.0
"""Seconds for peers to receive what was sent, and again for the coordinator to answer the goodbye."""


_LAST_WORDS_S = 0.2
"""Seconds for the goodbye if the coordinator may be frozen."""

_LEAVE_TIMEOUT = 5 * CLOSE_TIMEOUT
"""Seconds after which a goodbye that does not end is given up, so that the process can end."""


class MemberConnection:
    """One member of one job.

    Args:
        coordinators: the addresses of the job's coordinators.
        wanted: the job, and the wanted place in it.
        advertise: host or host:port at which peers reach this worker; None to find it.
        config: timeouts.
        thread: the loop.
        credentials: how this worker, the coordinator and other members authenticate each other.
        coordinator_returns: see `paceline.join`.

    Attributes:
        credentials: the same, with the key for proofs at members' doors.
        group: the group; set once `open` has returned, as is `store`.
        store: the job's key-value store.
        inbox: the coordinator's messages to the training thread.
        line: sends the training thread's messages.
    """

    group: Group
    store: CoordinatorStore

    def __init__(
        self,
        coordinators: CoordinatorAddresses,
        wanted: JoinRequest,
        advertise: str | None,
        config: Config,
        thread: LoopThread,
        credentials: Credentials,
        coordinator_returns: bool = True,
    ) -> None:
        self.job = wanted.job
        self._door_key = DoorKey()
        self._job_mark = JobMark()
        self.credentials = replace(credentials.for_worker(), door_key=self._door_key)
        self._coordinators = coordinators
        self._coordinator_returns = coordinator_returns
        self._wanted = wanted
        self._config = config
        self._thread = thread
        self._door = Door(wanted.job, self.credentials, config)
        self._door.on_exhausted(self.on_broken)
        self._barriers = Barriers()
        self._joined: Outcome[None] = Outcome()
        self._reason = f"no coordinator answers at {coordinators} yet"
        self._is_exhausted = False  # True if `open` failed for want of memory, threads or descriptors
        self._opened = self._give_up_at = time.monotonic()
        self._control: ControlStream | None = None
        self._registering: asyncio.Task[Any] | None = None
        self._closed = self._broken = False
        self._tasks: set[asyncio.Task[Any]] = set()  # they must have ended before the links that they make are closed
        self._flight: FlightLog | None = None
        self._sockets = Sockets(self._start)
        self._whereabouts = Whereabouts(coordinators, advertise, self._door, self._sockets)
        self.inbox = MemberInbox()
        self.line = LineClient(wanted.job, config, thread, self.inbox, self._start, self._stand_by)
        self.line.on_first_commit = self._tell_first_commit
        self._generations = Generations(wanted.job, config, thread, self.credentials, self._door.kinds)
        self._caller = store_pb2.Caller(job=wanted.job)
        self._counted_before = Counters()  # as an earlier member

    @property
    def mesh(self) -> GrpcMesh | NoMesh:
        """The links that the group uses; known once `open` has returned."""
        mesh = self._generations.mesh
        assert mesh is not None
        return mesh

    @property
    def member_id(self) -> str:
        """This member's id; known once `open` has returned."""
        return self._door.window.member_id

    @property
    def knocker(self) -> Knocker:
        """This member's id and address, for its knocks at other members' doors; known once `open` has returned."""
        return Knocker(self._door.window.member_id, str(self._whereabouts.address))

    def open(self, timeout: float) -> None:
        """Connects, registers, and waits for the first view.

        Raises:
            CoordinatorUnreachable: nobody answers.
            OperationTimeout: no view formed in time; the text says what was missing.
            PacelineError: the coordinator refused.
        """
        deadline = time.monotonic() + timeout
        self._thread.on_failure(self.on_broken)
        try:
            try:
                self._thread.run(self._register(timeout))
            except futures.CancelledError:
                if not self._joined.done():  # otherwise `give_up` cancelled it, and its error is raised below
                    raise
            left = max(0.0, deadline - time.monotonic())
            if not self._joined.wait(left):
                text = f"job {self.job!r} at {self._coordinators}: no view in {timeout:.1f} s: {self._reason}"
                raise errors.OperationTimeout(text)
            self._joined.result()
            self._flight = FlightLog(self.group.recorder, self._describe, flight_directory(os.environ))
            self.group.on_abort = self._flight.on_abort
            self._flight.watch_signal()
            keep_stack_file()
            self._job_mark.show(self._door_key)
        except BaseException as error:
            self._is_exhausted = is_exhausted(error)
            try:
                self.close()
            except Exception:  # noqa: BLE001  logged; the first error is the one that matters
                _log.exception("could not close the connections of a failed join")
            raise

    def give_up(self, error: errors.PacelineError) -> None:
        """Ends an `open` that still runs with this error, even while no coordinator answers. On the loop."""
        self._fail_join(error)
        if self._registering is not None:
            self._registering.cancel()

    def barrier(self, name: str, timeout: float) -> None:
        """Enters a named barrier and waits."""
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 s, not {timeout}")
        timeout = checked_timeout(timeout)
        self._barriers.check()  # first, because the end of the session also ends its generation
        self.mesh.fault.check()
        with self._barriers.turn(self.mesh.generation, name, timeout):
            entry = self._barriers.enter(self.mesh.generation, name, timeout)
            self._thread.loop.call_soon_threadsafe(self._send, pb.SessionRequest(enter_barrier=entry))
            self._barriers.wait(entry, timeout)

    def close(self, cause: str = "") -> None:
        """Leaves the job: first closes the links, so that peers get what was sent, then the session, then the door.

        Args:
            cause: this member's own error in words, for the others; empty for an orderly end.
        """
        self.inbox.put(SessionOver(errors.SessionClosed("this member has left the job")))
        mesh = self._generations.mesh
        # A coordinator that lives in one of the members may have failed together with a failed generation.
        doubted = not self._coordinator_returns and mesh is not None and mesh.fault.failed
        patience = _LAST_WORDS_S if doubted else CLOSE_TIMEOUT
        try:
            if self._generations.mesh is not None:
                if cause and self.mesh.peers:
                    me = self.mesh.peers[self.mesh.rank]
                    text = f"{me} raised {cause}"
                    operation = self.group.progress().operation
                    self.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, operation, text))
                # A slow peer has time to receive what was sent; a lost one ends the wait.
                self.group.close(CLOSE_TIMEOUT, drain=self._config.step_timeout)
                self.store.close()
        finally:  # an interrupt ends the wait above, not the goodbye: no member must wait for this one
            if self._flight is not None:
                self._flight.close()
            self._barriers.fail(errors.SessionClosed("the session has ended"))
            self._thread.forget(self.on_broken)
            try:
                self._thread.run(self._leave(cause, patience), _LEAVE_TIMEOUT, keep=True)
            except TimeoutError:  # grpc no longer works, for instance without memory or threads
                _log.error("job %r: leaving did not finish within %.0f s; giving up", self.job, _LEAVE_TIMEOUT)
            self._job_mark.remove()

    def start_line(self, source: StateSource) -> None:
        """Lets this member give its state to others, and come back as a new member if its session ends."""
        assert self._control is not None
        self._control.rejoins = True
        self._door.window.source = source

    def move(self, mesh: GrpcMesh) -> None:
        """Moves the group to the links of the next generation."""
        old = self.mesh
        self._generations.move(mesh)
        self.line.generation_began()
        self.group.move(mesh)
        self._thread.loop.call_soon_threadsafe(self._end_mesh, old)

    def _tell_first_commit(self) -> None:
        """Sends a heartbeat at once, so that the coordinator knows to a millisecond how long a recovery took."""
        if self.mesh.rank == 0 and self._control is not None:
            self._thread.loop.call_soon_threadsafe(self._control.beat)

    def _end_mesh(self, mesh: GrpcMesh | NoMesh) -> None:
        self._start(mesh.end())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it."""
        return self._thread.run(work)

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a coroutine on the loop; this member ends if it fails."""
        self._thread.loop.call_soon_threadsafe(lambda: self._start(work()))

    def _describe(self) -> dict[str, Any]:
        """Describes the member whose flight record is written."""
        mesh = self.mesh
        if not mesh.peers:
            return {"job": self.job, "rank": mesh.rank, "size": 0, "generation": 0, "host": "", "member_id": ""}
        me = mesh.peers[mesh.rank]
        facts = {"job": self.job, "rank": mesh.rank, "size": mesh.size, "generation": mesh.generation}
        return {**facts, "host": me.host, "member_id": me.member_id, "links": sorted(mesh.sent_bytes)}

    # On the loop.

    def _tell_waiting(self) -> bool:
        """Tells the launcher what this worker waits for, so that it can show the user; True if it is told."""
        if not self._joined.done():
            left = self._give_up_at - time.monotonic()
            unanswered = self._control is None or self._control.registered is None
            how_long = f"; trying for another {left:.0f} s" if unanswered and left >= 1.0 else ""
            reason = f"job {self.job!r}: {self._reason}"
            return tell_launcher("waiting", {"job": self.job, "reason": reason + how_long, "key": reason})
        return False

    def _on_trouble(self, text: str) -> None:
        """Reports at once that a name does not resolve or has no route, since that is mostly a typing error."""
        self._reason = text
        if not self._tell_waiting():
            _log.warning("job %r: %s", self.job, text)

    async def _register(self, timeout: float) -> None:
        if self._joined.done():  # given up already
            return
        self._registering = asyncio.current_task()
        self._tasks.update(filter(None, [self._registering]))  # an interrupted `open` does not wait for it to end
        self._opened = time.monotonic()
        self._give_up_at = self._opened + timeout
        asyncio.get_running_loop().call_later(_PATIENT, self._tell_waiting)
        unanswered = self._reason
        await self._whereabouts.open_door(timeout, self._on_trouble)
        self._reason = unanswered
        self._sockets.dial(self._coordinators)
        register = self._wanted.register(str(self._whereabouts.address), self._config.failure_timeout)
        self._control = ControlStream(
            self._coordinators,
            register,
            self._config,
            self,
            self._progress,
            self.credentials,
            self._coordinator_returns,
        )
        self.line.control = self._generations.control = self._control
        await self._control.open(max(0.0, self._opened + timeout - time.monotonic()))

    def on_registered(self) -> None:
        """See `ControlListener`."""
        assert self._control is not None
        registered = self._control.registered
        assert registered is not None
        if registered.member_id != self.member_id and self._generations.mesh is not None:
            self._counted_before = self._counted()  # a new member begins to count at 0
        self._door_key.learn(registered.door_secret, registered.member_id)
        self._job_mark.show(self._door_key)
        self._door.window.member_id = registered.member_id
        self._caller.member_id, self._caller.session_token = registered.member_id, registered.session_token

    async def _leave(self, cause: str, patience: float) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._generations.end()
        if self._control is not None:
            await self._control.leave(cause, patience)
        if not self._is_exhausted:  # grpc would wait for threads that cannot start, and hold the interpreter meanwhile
            await self._door.close()
        self._sockets.forget()

    def on_message(self, message: Message) -> None:
        """See `ControlListener`."""
        match message:
            case Waiting():
                self._wait_for(message)
            case ViewFormed():
                self.line.forget_meeting()
                self._generations.formed(message.generation)
                self._start(self._adopt(message))
            case Verdict():
                if not self._generations.settle(message):
                    self._fail_join(error_of(message))
            case BarrierPassed() | BarrierFailed():
                self._barriers.answer(message)
            case _:
                self.line.hear(message)

    def _wait_for(self, message: Waiting) -> None:
        if message.reason == self._reason:
            return
        self.inbox.put(message)
        _log.info("job %r: %s", self.job, message.reason)
        self._reason = message.reason
        if time.monotonic() - self._opened > _PATIENT:
            self._tell_waiting()

    def on_ended(self, error: errors.PacelineError) -> None:
        """See `ControlListener`: the coordinator has ended the session, or it cannot be reached any more."""
        self._barriers.fail(error)
        self.inbox.put(SessionOver(error))
        if not self._joined.done():
            self._fail_join(error)
        elif isinstance(error, errors.OrphanedError):
            self._generations.coordinator_gone()
            level = logging.ERROR if self._coordinator_returns else logging.INFO  # links report its member's fate
            _log.log(level, "%s; collectives continue without it as long as all members live", error)
        else:  # probably evicted while it was cut off: other members refuse its messages
            self._generations.session_ended(str(error))

    def on_closed(self) -> None:
        """See `ControlListener`: the group continues along its links; calls that need the coordinator are refused."""
        text = f"the coordinator at {self._coordinators} has ended for good, with the process that ran it"
        error = errors.OrphanedError(text if self._joined.done() else f"{text}; before that: {self._reason}")
        self._barriers.fail(error)
        self.inbox.put(SessionOver(error))
        self._fail_join(error)
        if self._generations.mesh is not None:
            self.store.close()
            _log.info("job %r: %s; collectives continue without it", self.job, text)

    def on_broken(self, error: BaseException) -> None:
        """See `ControlListener`: tells the others, and ends every wait of this member with the error."""
        self._end_with(error)

    def _end_with(self, error: BaseException, view: ViewFormed | None = None) -> None:
        if self._closed or self._broken:
            return
        self._broken = True
        self._generations.broke(error, view)
        self.inbox.put(SessionOver(error))
        self._barriers.fail(error)
        self._fail_join(error)

    def on_reconnected(self) -> None:
        """See `ControlListener`: repeats what may have been lost with the old stream."""
        self.inbox.connected = True
        self.line.say_again()
        if self.line.went_on and self.mesh.peers:
            # Others may still wait in the meeting, and this member for them in its step: now all of them can meet.
            text = f"{self.mesh.peers[self.mesh.rank]} continued without the coordinator, which is back now"
            raised = ErrorReason.ERROR_REASON_PEER_RAISED
            self.mesh.fault.suspect(Suspicion(raised, None, self.group.progress().operation, text))
        for entry in self._barriers.in_flight():
            self._send(pb.SessionRequest(enter_barrier=entry))
        self._generations.report_again()

    def on_disconnected(self) -> None:
        """See `ControlListener`."""
        self.inbox.connected, self.inbox.summoned = False, 0
        self._generations.coordinator_away()

    def on_new_session(self) -> None:
        """See `ControlListener`: other members refuse what this member sends in its old generation."""
        self.line.forget_meeting()
        if self._generations.mesh is not None:
            text = "the session has ended: this member was declared lost while it could not be reached"
            self._generations.outdate(text)
            self.inbox.put(SessionReplaced())

    async def on_away(self, timeout: float) -> str:
        """See `ControlListener`: breaks links to an address that has gone, since waits on them would not end."""
        moved = await self._whereabouts.renew(timeout, self._generations.cut_off)
        return str(self._whereabouts.address) if moved else ""

    def on_asked(self, asked: pb.Asked) -> None:
        """See `ControlListener`."""
        assert self._control is not None
        self._start(answer_question(asked, self._control, self.job, self._record, self._door_key))

    def _record(self) -> dict[str, Any]:
        if self._generations.mesh is None:
            return whole_record(None, {"job": self.job, "member_id": self.member_id})
        return whole_record(self.group.recorder, self._describe())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handles the failure of a task on the loop, since no caller waits for the task."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # raised on the training thread
            _log.error("job %r: this worker cannot go on", self.job, exc_info=error)
            self.on_broken(error)

    def _stand_by(self, reason: str) -> None:
        """Makes `join` return without a view, because the job goes on, or is done, without this worker."""
        if not self._joined.done():
            self._enter(NoMesh(reason, self._door.kinds))

    async def _adopt(self, view: ViewFormed) -> None:
        """Makes the links of a view. In `join` the group begins with them; later the training thread moves it there."""
        try:
            await self._make_links(view)
        except Exception as error:  # noqa: BLE001  raised on the training thread; the other members of the view are told
            _log.exception("job %r: the links of generation %d could not be created", self.job, view.generation)
            self._end_with(error, view)

    async def _make_links(self, view: ViewFormed) -> None:
        assert self._control is not None
        member_id, mesh = self.member_id, None
        try:
            peers = await self.line.members.fetch(
                self._control.channel, self.job, view.members, self._config.call_timeout
            )
            self._sockets.dial([*self._coordinators, *(parse_endpoint(peer.address) for peer in peers)])
        except Exception as error:  # `join` must raise it, whatever it is
            if is_exhausted(error):
                raise
            _log.info("could not fetch the members of generation %d: %s", view.generation, error)
            self._fail_join(error)
            text = f"rank {view.rank} ({socket.gethostname()}) could not fetch the list of its members: {error}"
            reason = ErrorReason.ERROR_REASON_PEER_RAISED
            report = pb.Report(generation=view.generation, reason=reason, text=text[:2000])
            if view.generation == self._control.generation:  # the other members wait for this one
                self._send(pb.SessionRequest(report=report))
        else:
            if self._closed or (self._joined.done() and self._generations.mesh is None):  # join has been given up
                return
            mesh = self._generations.make(view, peers)
            self._door.enter(mesh)
            facts = {"job": self.job, "rank": view.rank, "world_size": mesh.size, "generation": view.generation}
            tell_launcher("view", {**facts, "pid": os.getpid()})
            _log.info("job %r: rank %d of %d in generation %d", self.job, view.rank, mesh.size, view.generation)
        if not self._joined.done():
            if mesh is not None:
                self._enter(mesh)
            return
        self._generations.coming = mesh
        self.inbox.put(ViewLinked(view, mesh, member_id))

    def _enter(self, mesh: GrpcMesh | NoMesh) -> None:
        """Lets `join` return; the group begins here."""
        assert self._control is not None
        self.group = Group(mesh, self._config)
        if self._wanted.max_workers > self._wanted.min_workers:
            self.group.make_elastic(self._wanted.max_workers)
        self.store = CoordinatorStore(self._thread, self._control.channel, self._caller, self._config.call_timeout)
        self._generations.mesh = mesh
        self._joined.set_result(None)

    def _fail_join(self, error: BaseException) -> None:
        if not self._joined.done():
            self._joined.set_exception(error)

    def _send(self, request: pb.SessionRequest) -> None:
        assert self._control is not None
        self._control.send(request)

    def _progress(self) -> pb.Heartbeat:
        if self._generations.mesh is None:
            return pb.Heartbeat()
        progress, doing = self.group.progress(), ""
        if progress.inside:
            signature = self.group.recorder.find(self.group.generation, "", progress.operation)
            doing = signature.partition(b" ")[0].decode("ascii", "replace")[:64] if signature else ""
        counters = counted_since(self._counted_before, self._counted())
        return heartbeat(progress, doing, self.line.step, self.line.step_at, counters)

    def _counted(self) -> Counters:
        return self.group.counters.read(self.group.mesh.sent_bytes)
