"""A member of a job while it lives: control stream, front door, mesh and group, wired together.

The coordinator's messages arrive here on the loop thread; the user's calls wait here on the user's own thread. How it
comes to live, and how it ends, is in `joining` and `leaving`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from paceline import errors
from paceline._base.activity import counted_since
from paceline._base.addresses import CoordinatorAddresses, is_exhausted, parse_endpoint
from paceline._base.proofs import DoorKey
from paceline._base.rpc import duration
from paceline._base.usage import ProcessUsage
from paceline._base.waits import LoopThread
from paceline._group import Group
from paceline._links.fault import Suspicion, error_of
from paceline._links.grpc_door import Door
from paceline._links.grpc_knock import Knocker
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.grpc_state import StateSource
from paceline._links.nowhere import NoMesh
from paceline._session.answers import answer_question, whole_record
from paceline._session.barrier import Barriers
from paceline._session.control import ControlStream
from paceline._session.first_view import FirstView
from paceline._session.flight import FlightLog
from paceline._session.generations import Generations
from paceline._session.identity import JoinRequest
from paceline._session.inbox import MemberInbox, SessionOver, SessionReplaced, ViewLinked
from paceline._session.launcher_pipe import tell_launcher, tell_once
from paceline._session.line_client import LineClient
from paceline._session.stack_file import JobMark
from paceline._session.store import CoordinatorStore
from paceline._session.whereabouts import Sockets, Whereabouts
from paceline.config import Config, checked_timeout
from paceline.credentials import Credentials
from paceline_protocol import Counters, Verdict
from paceline_protocol.messages import BarrierFailed, BarrierPassed, Message, ViewFormed, Waiting
from pacelinepb import MOST_KINDS
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1 import store_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason

_PART_CHARACTERS = 120
"""The longest text of a heartbeat about what a member waits in."""

_LONG_WAIT_S = 30.0
"""Seconds in one operation after which the user is told: a rank may hang."""

_log = logging.getLogger("paceline.session")

T = TypeVar("T")


class MemberConnection:
    """One member of one job. It listens to its control stream (`ControlListener`).

    `advertise` is the host or host:port at which peers reach this worker; None to find it. `credentials` get the key
    for proofs at members' doors. `group` and `store` are set once `first_view` is over, `control` when this worker
    registers, `flight` when `join` has returned. `tasks` run on the loop for this member, and must have ended before
    its links are closed. `left` is True once it leaves.
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
        self.door_key = DoorKey()
        self.job_mark = JobMark()
        self.credentials = replace(credentials.for_worker(), door_key=self.door_key)
        self.coordinators = coordinators
        self.coordinator_returns = coordinator_returns
        self.wanted = wanted
        self.config = config
        self.thread = thread
        self.door = Door(wanted.job, self.credentials, config)
        self.door.on_exhausted(self.on_broken)
        self.barriers = Barriers()
        self.first_view = FirstView(wanted.job, coordinators)
        self.control: ControlStream | None = None
        self.left = self._broken = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.flight: FlightLog | None = None
        self.sockets = Sockets(self._start)
        self.whereabouts = Whereabouts(coordinators, advertise, self.door, self.sockets)
        self.inbox = MemberInbox()
        position = 0 if wanted.mates is None else wanted.mates.position
        self.line = LineClient(wanted.job, config, thread, self.inbox, self._start, self._stand_by, position)
        self.line.on_first_commit = self._tell_first_commit
        self.generations = Generations(wanted.job, config, thread, self.credentials, self.door.kinds)
        self._caller = store_pb2.Caller(job=wanted.job)
        self._counted_before = Counters()  # as an earlier member
        self._told_of_wait = (0, 0)  # generation and operation
        self._usage = ProcessUsage()

    @property
    def mesh(self) -> GrpcMesh | NoMesh:
        """The links that the group uses; known once it has joined."""
        mesh = self.generations.mesh
        assert mesh is not None
        return mesh

    @property
    def member_id(self) -> str:
        """This member's id; known once it has joined."""
        return self.door.window.member_id

    @property
    def knocker(self) -> Knocker:
        """This member's id and address, for its knocks at other members' doors; known once it has joined."""
        return Knocker(self.door.window.member_id, str(self.whereabouts.address))

    def barrier(self, name: str, timeout: float) -> None:
        """Enters a named barrier and waits."""
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 s, not {timeout}")
        timeout = checked_timeout(timeout)
        self.barriers.check()  # first, because the end of the session also ends its generation
        self.mesh.fault.check()
        with self.barriers.turn(self.mesh.generation, name, timeout):
            entry = self.barriers.enter(self.mesh.generation, name, timeout)
            self.thread.loop.call_soon_threadsafe(self._send, pb.SessionRequest(enter_barrier=entry))
            self.barriers.wait(entry, timeout)

    def start_line(self, source: StateSource) -> None:
        """Lets this member give its state to others, and come back as a new member if its session ends."""
        assert self.control is not None
        self.control.rejoins = True
        self.door.window.source = source

    def move(self, mesh: GrpcMesh) -> None:
        """Moves the group to the links of the next generation."""
        old = self.mesh
        self.generations.move(mesh)
        self.line.generation_began()
        self.group._core.move(mesh)
        self.thread.loop.call_soon_threadsafe(self._end_mesh, old)

    def _tell_first_commit(self) -> None:
        """Sends a heartbeat at once, so that the coordinator knows to a millisecond how long a recovery took."""
        if self.mesh.rank == 0 and self.control is not None:
            self.thread.loop.call_soon_threadsafe(self.control.beat)

    def _end_mesh(self, mesh: GrpcMesh | NoMesh) -> None:
        self._start(mesh.end())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it."""
        return self.thread.run(work)

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a coroutine on the loop; this member ends if it fails."""
        self.thread.loop.call_soon_threadsafe(lambda: self._start(work()))

    def describe(self) -> dict[str, Any]:
        """Describes the member whose flight record is written."""
        mesh = self.mesh
        if not mesh.peers:
            return {"job": self.job, "rank": mesh.rank, "size": 0, "generation": 0, "host": "", "member_id": ""}
        me = mesh.peers[mesh.rank]
        facts = {"job": self.job, "rank": mesh.rank, "size": mesh.size, "generation": mesh.generation}
        return {**facts, "host": me.host, "member_id": me.member_id, "links": sorted(mesh.sent_bytes)}

    # On the loop.

    def on_registered(self) -> None:
        """Takes over this member's id, its token and the job's secret."""
        assert self.control is not None
        registered = self.control.registered
        assert registered is not None
        self.first_view.answered = True
        if registered.member_id != self.member_id and self.generations.mesh is not None:
            self._counted_before = self._counted()  # a new member begins to count at 0
        self.door_key.learn(registered.door_secret, registered.member_id)
        self.job_mark.show(self.door_key)
        self.door.window.member_id = registered.member_id
        self._caller.member_id, self._caller.session_token = registered.member_id, registered.session_token

    def on_message(self, message: Message) -> None:
        """Hands a message of the coordinator to the part that it concerns."""
        match message:
            case Waiting():
                self._wait_for(message)
            case ViewFormed():
                self.line.forget_meeting()
                self.generations.formed(message.generation)
                self._start(self._adopt(message))
            case Verdict():
                if not self.generations.settle(message):
                    self.first_view.fail(error_of(message))
            case BarrierPassed() | BarrierFailed():
                self.barriers.answer(message)
            case _:
                self.line.hear(message)

    def _wait_for(self, message: Waiting) -> None:
        if message.reason == self.first_view.reason:
            return
        self.inbox.put(message)
        _log.info("job %r: %s", self.job, message.reason)
        self.first_view.waits_for(message.reason)

    def on_ended(self, error: errors.PacelineError) -> None:
        """Ends what needs the session, which the coordinator has ended, or which has no coordinator any more."""
        over = self.first_view.is_over and not isinstance(error, errors.OrphanedError)
        if (over or isinstance(error, errors.ReplicaLost)) and self.wanted.mates is not None:
            self.wanted.mates.end(error)  # this rank may wait for one that never got the view, and will not come
        self.barriers.fail(error)
        self.inbox.put(SessionOver(error))
        if not self.first_view.is_over:
            self.first_view.fail(error)
        elif isinstance(error, errors.OrphanedError):
            self.generations.coordinator_gone()
            level = logging.ERROR if self.coordinator_returns else logging.INFO  # links report its member's fate
            _log.log(level, "%s; collectives continue without it as long as all members live", error)
        else:  # probably evicted while it was cut off: other members refuse its messages
            self.generations.session_ended(error)

    def on_closed(self) -> None:
        """Refuses calls that need the coordinator; the group continues along its links."""
        text = f"the coordinator at {self.coordinators} has ended for good, with the process that ran it"
        error = errors.OrphanedError(
            text if self.first_view.is_over else f"{text}; before that: {self.first_view.reason}"
        )
        self.barriers.fail(error)
        self.inbox.put(SessionOver(error))
        self.first_view.fail(error)
        if self.generations.mesh is not None:
            self.store.close()
            _log.info("job %r: %s; collectives continue without it", self.job, text)

    def on_broken(self, error: BaseException) -> None:
        """Tells the others, and ends every wait of this member with the error."""
        self._end_with(error)

    def _end_with(self, error: BaseException, view: ViewFormed | None = None) -> None:
        if self.left or self._broken:
            return
        self._broken = True
        self.generations.broke(error, view)
        self.inbox.put(SessionOver(error))
        self.barriers.fail(error)
        self.first_view.fail(error)

    def on_reconnected(self) -> None:
        """Repeats what may have been lost with the old stream."""
        self.inbox.connected = True
        self.line.say_again()
        if self.line.went_on and self.mesh.peers:
            # Others may still wait in the meeting, and this member for them in its step: now all of them can meet.
            text = f"{self.mesh.peers[self.mesh.rank]} continued without the coordinator, which is back now"
            raised = ErrorReason.ERROR_REASON_PEER_RAISED
            self.mesh.fault.suspect(Suspicion(raised, None, self.group._core.progress().operation, text))
        for entry in self.barriers.in_flight():
            self._send(pb.SessionRequest(enter_barrier=entry))
        self.generations.report_again()

    def on_disconnected(self) -> None:
        """Notes that the coordinator is out of reach."""
        self.inbox.connected, self.inbox.summoned = False, 0
        self.generations.coordinator_away()

    def on_new_session(self) -> None:
        """Ends the old generation, in which other members refuse what this member sends."""
        self.line.forget_meeting()
        if self.generations.mesh is not None:
            text = "the session has ended: this member was declared lost while it could not be reached"
            self.generations.outdate(text)
            self.inbox.put(SessionReplaced())

    async def on_away(self, timeout: float) -> str:
        """Breaks links to an address that has gone, since waits on them would not end."""
        moved = await self.whereabouts.renew(timeout, self.generations.cut_off)
        return str(self.whereabouts.address) if moved else ""

    def on_asked(self, asked: pb.Asked) -> None:
        """Answers an operator's question."""
        assert self.control is not None
        self._start(answer_question(asked, self.control, self.job, self._record, self.door_key))

    def _record(self) -> dict[str, Any]:
        if self.generations.mesh is None:
            return whole_record(None, {"job": self.job, "member_id": self.member_id})
        return whole_record(self.group._core.recorder, self.describe())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handles the failure of a task on the loop, since no caller waits for the task."""
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # raised on the training thread
            _log.error("job %r: this worker cannot go on", self.job, exc_info=error)
            self.on_broken(error)

    def _stand_by(self, reason: str) -> None:
        """Makes `join` return without a view, because the job goes on, or is done, without this worker."""
        if not self.first_view.is_over:
            self._enter(NoMesh(reason, self.door.kinds))

    async def _adopt(self, view: ViewFormed) -> None:
        """Makes the links of a view. In `join` the group begins with them; later the training thread moves it there."""
        try:
            await self._make_links(view)
        except Exception as error:  # noqa: BLE001  raised on the training thread; the other members of the view are told
            _log.exception("job %r: the links of generation %d could not be created", self.job, view.generation)
            self._end_with(error, view)

    async def _make_links(self, view: ViewFormed) -> None:
        assert self.control is not None
        member_id, mesh = self.member_id, None
        try:
            peers = await self.line.members.fetch(
                self.control.channel, self.job, view.members, self.config.call_timeout
            )
            self.sockets.dial([*self.coordinators, *(parse_endpoint(peer.address) for peer in peers)])
        except Exception as error:  # `join` must raise it, whatever it is
            if is_exhausted(error):
                raise
            _log.info("could not fetch the members of generation %d: %s", view.generation, error)
            self.first_view.fail(error)
            text = f"rank {view.rank} ({socket.gethostname()}) could not fetch the list of its members: {error}"
            reason = ErrorReason.ERROR_REASON_PEER_RAISED
            report = pb.Report(generation=view.generation, reason=reason, text=text[:2000])
            if view.generation == self.control.generation:  # the other members wait for this one
                self._send(pb.SessionRequest(report=report))
        else:
            if self.left or (self.first_view.is_over and self.generations.mesh is None):  # join has been given up
                return
            mesh = self.generations.make(view, peers)
            self.door.enter(mesh)
            facts = {"job": self.job, "rank": view.rank, "world_size": mesh.size, "generation": view.generation}
            tell_launcher("view", {**facts, "pid": os.getpid()})
            _log.info("job %r: rank %d of %d in generation %d", self.job, view.rank, mesh.size, view.generation)
        if not self.first_view.is_over:
            if mesh is not None:
                self._enter(mesh)
            return
        self.generations.coming = mesh
        self.inbox.put(ViewLinked(view, mesh, member_id))

    def _enter(self, mesh: GrpcMesh | NoMesh) -> None:
        """Lets `join` return; the group begins here."""
        assert self.control is not None
        self.group = Group(mesh, self.config)
        if self.wanted.max_workers > self.wanted.min_workers:
            self.group._core.make_elastic(self.wanted.max_workers)
        self.store = CoordinatorStore(self.thread, self.control.channel, self._caller, self.config.call_timeout)
        self.generations.mesh = mesh
        self.first_view.came()

    def _send(self, request: pb.SessionRequest) -> None:
        assert self.control is not None
        self.control.send(request)

    def heartbeat(self) -> pb.Heartbeat:
        """Makes the next heartbeat."""
        usage = pb.Heartbeat(cpu=self._usage.cores(), memory=self._usage.memory())
        if self.generations.mesh is None:
            return usage
        core = self.group._core
        progress = core.progress()
        counters, now = counted_since(self._counted_before, self._counted()), time.monotonic()
        if progress.inside and now - progress.since > _LONG_WAIT_S:
            self._tell_of_wait(f"{core.doing(progress.operation)} {progress.operation}", progress.operation)
        return pb.Heartbeat(
            operation=progress.operation,
            since=duration(max(0.0, now - progress.since)),
            inside=progress.inside,
            step=self.line.step,
            step_since=duration(max(0.0, now - self.line.step_at)),
            committed=counters.committed,
            undone=counters.undone,
            samples=counters.samples,
            sent_bytes=dict(sorted(counters.sent_bytes.items(), key=lambda sent: -sent[1])[:MOST_KINDS]),
            in_collectives=duration(counters.in_collectives),
            doing=core.doing(progress.operation) if progress.inside else "",
            checkpoint_step=counters.checkpoint_step,
            checkpoints=counters.checkpoints,
            checkpoint_failures=counters.checkpoint_failures,
            checkpoint_time=duration(counters.checkpoint_time),
            state_bytes=counters.state_bytes,
            state_time=duration(counters.state_time),
            speed=counters.speed,
            share=counters.share,
            total=counters.total,
            logged=counters.logged,
            cpu=usage.cpu,
            memory=usage.memory,
            operations=counters.operations,
            part="" if progress.inside else core.waits_in_part()[:_PART_CHARACTERS],
        )

    def _tell_of_wait(self, where: str, operation: int) -> None:
        """Says once that this member, like most others, waits for long in an operation; it does not know for whom."""
        place = (self.mesh.generation, operation)
        if place == self._told_of_wait:
            return
        self._told_of_wait = place
        text = (
            f"job {self.job!r} has been in {where} for {_LONG_WAIT_S:.0f} s: `paceline status {self.job}` says which "
            f"ranks hold it up, and `paceline debug stacks {self.job}` where they are"
        )
        tell_once(_log, text, key=f"waits in {self.job} {place}")

    def _counted(self) -> Counters:
        return self.group._core.counters.read(self.group._core.mesh.sent_bytes)
