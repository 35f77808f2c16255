"""A member's connection to its job: control stream, front door, mesh and group, wired together.

Everything that the coordinator pushes arrives here on the loop thread; everything that the user waits for waits here on
his own thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent import futures
from typing import Any, TypeVar

from paceline import errors
from paceline._fork import protect
from paceline._loop import LoopThread
from paceline._wait import wait_in_slices
from paceline.checkpoint.tag import Tag
from paceline.config import Config, checked_timeout
from paceline.group import Group
from paceline.links.fault import Fault, Suspicion, Verdict, read_verdict
from paceline.links.grpc_door import Door
from paceline.links.grpc_mesh import GrpcMesh
from paceline.links.grpc_state import StateSource
from paceline.links.nowhere import NoMesh
from paceline.session.address import Endpoint, parse_endpoint, reachable_endpoint, resolve
from paceline.session.barrier import Barriers
from paceline.session.control import ControlStream, heartbeat
from paceline.session.flight import FlightLog, flight_directory
from paceline.session.identity import process_identity
from paceline.session.launcher import tell_launcher
from paceline.session.mail import CatchUpAsked, CaughtOut, JobDone, Lost, Mail, MayGo, Misfits, Runs, ViewCame, Waits
from paceline.session.store import CoordinatorStore
from paceline.session.view import fetch_peers, read_peer
from paceline.session.wire import duration
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1 import store_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["MemberConnection", "Membership"]

_log = logging.getLogger("paceline.session")

T = TypeVar("T")

_PATIENT = 1.0
"""Seconds to wait for a view before somebody is told: most form sooner."""

CLOSE_TIMEOUT = 2.0
"""Seconds for peers to take in what was sent, and again for the coordinator to answer the goodbye."""


class Membership:
    """What a worker asks of its job: the bounds of the world, or a rank of its own."""

    def __init__(self, job: str, min_workers: int, max_workers: int, rank: int | None) -> None:
        self.job = job
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.rank = rank


class MemberConnection:
    """One member of one job.

    Args:
        coordinator: its address.
        wanted: the job and the place in it.
        advertise: host or host:port at which peers reach this worker; None to find it.
        config: timeouts.
        thread: the loop.
    """

    group: Group
    mesh: GrpcMesh | NoMesh
    store: CoordinatorStore

    def __init__(
        self, coordinator: Endpoint, wanted: Membership, advertise: str | None, config: Config, thread: LoopThread
    ) -> None:
        self.job = wanted.job
        self._coordinator = coordinator
        self._wanted = wanted
        self._advertise = advertise
        self._config = config
        self._thread = thread
        self._door = Door(wanted.job)
        self._barriers = Barriers()
        self._joined: futures.Future[None] = futures.Future()
        self._reason = f"no coordinator answers at {coordinator} yet"
        self._opened = time.monotonic()
        self._control: ControlStream | None = None
        self._ready = threading.Event()
        self._closed = False
        self._reported: pb.SessionRequest | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # that must have ended before what they build is taken down
        self._flight: FlightLog | None = None
        self.mail = Mail()
        self._meet: pb.SessionRequest | None = None  # what was said last about a meeting, until a view has formed
        self._finish: pb.SessionRequest | None = None
        self._early: Verdict | None = None  # on a view that is being adopted
        self._coming: GrpcMesh | None = None  # links of a view that the group has yet to move to
        self._caller = store_pb2.Caller(job=wanted.job)
        self._step, self._step_at = 0, 0.0

    def open(self, timeout: float) -> None:
        """Connects, registers, and waits for the first view.

        Raises:
            CoordinatorUnreachable: nobody answers.
            OperationTimeout: no view formed in time; the text says what was waited for.
            PacelineError: the coordinator refused.
        """
        deadline = time.monotonic() + timeout
        try:
            self._thread.run(self._register(timeout))
            left = max(0.0, deadline - time.monotonic())
            if not wait_in_slices(lambda seconds: futures.wait([self._joined], seconds).done, left):
                text = f"job {self.job!r} at {self._coordinator}: no view in {timeout:.1f} s: {self._reason}"
                raise errors.OperationTimeout(text)
            self._joined.result()
            self._flight = FlightLog(self.group.recorder, self._describe, flight_directory(os.environ))
            self.group.on_abort = self._flight.on_abort
            self._flight.watch_signal()
        except BaseException:
            try:
                self.close()
            except Exception:  # noqa: BLE001  logged; the first error is the one that matters
                _log.exception("could not close what join had opened")
            raise

    def barrier(self, name: str, timeout: float) -> None:
        """Enters a named barrier and waits."""
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 s, not {timeout}")
        timeout = checked_timeout(timeout)
        self.mesh.fault.check()
        with self._barriers.turn(self.mesh.generation, name, timeout):
            entry = self._barriers.enter(self.mesh.generation, name, timeout)
            self._thread.loop.call_soon_threadsafe(self._send, pb.SessionRequest(enter_barrier=entry))
            self._barriers.wait(entry, timeout)

    def close(self, cause: str = "") -> None:
        """Leaves: links first, so that peers get what was sent, then the coordinator, then the door.

        Args:
            cause: this member's own error in words, for the others; empty for an orderly end.
        """
        try:
            if self._ready.is_set():
                if cause and self.mesh.peers:
                    me = self.mesh.peers[self.mesh.rank]
                    text = f"{me} raised {cause}"
                    operation = self.group.progress().operation
                    self.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, operation, text))
                # A slow peer is given its time to take in what was sent; a lost one ends the wait.
                self.group.close(CLOSE_TIMEOUT, drain=self._config.step_timeout)
                self.store.close()
        finally:  # an interrupt ends the wait above, not the goodbye: nobody shall wait for this member
            if self._flight is not None:
                self._flight.close()
            self._barriers.fail(errors.SessionClosed("the session has ended"))
            self._thread.start(self._leave(cause)).result()

    # The line, for the training thread.

    def start_line(self, source: StateSource) -> None:
        """From now on this member gives its state to others, and comes back as a new one if its session ends."""
        assert self._control is not None
        self._control.rejoins = True
        self._door.window.source = source

    def meet(self, meet: pb.Meet) -> None:
        """Says that this member has stopped; again after a reconnect, until a view has formed."""
        request = pb.SessionRequest(meet=meet)

        def send() -> None:
            assert self._control is not None
            if meet.generation in (0, self._control.generation):  # else the session is a new one: so it is told anew
                self._meet = request
                self._send(request)

        self._thread.loop.call_soon_threadsafe(send)

    def go_on(self) -> None:
        """What was said about a meeting is not to be said again."""

        def forget() -> None:
            self._meet = None

        self._thread.loop.call_soon_threadsafe(forget)

    def finish(self, generation: int, step: int) -> None:
        """Says that the line is done; again after a reconnect."""
        request = pb.SessionRequest(finish=pb.Finish(generation=generation, step=step))

        def send() -> None:
            self._finish = request
            self._send(request)

        self._thread.loop.call_soon_threadsafe(send)

    def word_completed(self, step: int) -> None:
        """The word of this step has completed: every member was there. For heartbeats."""
        self._step_at = time.monotonic()
        self._step = step

    def move(self, mesh: GrpcMesh) -> None:
        """The group goes on in the next generation."""
        old, self.mesh = self.mesh, mesh
        if self._coming is mesh:
            self._coming = None
        self._reported = None
        self._step = 0
        self.group.move(mesh)
        self._thread.loop.call_soon_threadsafe(self._end_mesh, old)

    def _end_mesh(self, mesh: GrpcMesh | NoMesh) -> None:
        self._start(mesh.end())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it."""
        return self._thread.run(work)

    def _describe(self) -> dict[str, Any]:
        """Whose flight record it is."""
        mesh = self.mesh
        if not mesh.peers:
            return {"job": self.job, "rank": mesh.rank, "size": 0, "generation": 0, "host": "", "member_id": ""}
        me = mesh.peers[mesh.rank]
        facts = {"job": self.job, "rank": mesh.rank, "size": mesh.size, "generation": mesh.generation}
        return {**facts, "host": me.host, "member_id": me.member_id}

    # On the loop.

    def _tell_waiting(self) -> None:
        """A launcher that has a person before it shows what is waited for."""
        if not self._joined.done():
            tell_launcher("waiting", {"job": self.job, "reason": f"job {self.job!r}: {self._reason}"})

    async def _register(self, timeout: float) -> None:
        self._tasks.update(filter(None, [asyncio.current_task()]))  # an interrupted `open` does not wait for its end
        self._opened = time.monotonic()
        asyncio.get_running_loop().call_later(_PATIENT, self._tell_waiting)
        where = await reachable_endpoint(self._coordinator, self._advertise)
        port = await self._door.start("0.0.0.0" if self._advertise else where.host, where.port)  # noqa: S104  # asked for
        me = Endpoint(where.host, where.port or port)
        self._listening_port = port
        await self._protect([])
        register = pb.Register(
            job=self.job,
            protocol_version=PROTOCOL_VERSION,
            process=process_identity(),
            address=str(me),
            settings=pb.JobSettings(
                min_workers=self._wanted.min_workers,
                max_workers=self._wanted.max_workers,
                failure_timeout=duration(self._config.failure_timeout),
            ),
            rank=self._wanted.rank,
        )
        self._control = ControlStream(str(self._coordinator), register, self._config, self, self._progress)
        await self._control.open(timeout)
        self._know_member()

    def _know_member(self) -> None:
        assert self._control is not None
        registered = self._control.registered
        assert registered is not None
        self._door.window.member_id = registered.member_id
        self._caller.member_id, self._caller.session_token = registered.member_id, registered.session_token

    async def _leave(self, cause: str) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for mesh in (self._coming, self.mesh if self._ready.is_set() else None):
            if mesh is not None:
                await mesh.end()
        if self._control is not None:
            await self._control.leave(cause, CLOSE_TIMEOUT)
        await self._door.close()
        protect(id(self), listening_port=0, dialled=set())

    def on_waiting(self, reason: str) -> None:
        """See `Listener`."""
        if reason == self._reason:
            return
        self.mail.put(Waits(reason))
        _log.info("job %r: %s", self.job, reason)
        self._reason = reason
        if time.monotonic() - self._opened > _PATIENT:
            self._tell_waiting()

    def on_view(self, view: pb.ViewFormed) -> None:
        """See `Listener`."""
        self._meet = self._early = None
        if self._ready.is_set():
            self.mesh.retire()
            # Whoever went on in the old one while the coordinator was away, and is in a step, stops there.
            stale, text = ErrorReason.ERROR_REASON_STALE_GENERATION, f"generation {view.generation} has formed"
            self.mesh.fault.settle(Verdict(self.mesh.generation, stale, (), 0, text))
        self._start(self._adopt(view))

    def on_verdict(self, verdict: pb.Verdict) -> None:
        """See `Listener`."""
        word = read_verdict(verdict)
        if self._coming is not None and word.generation == self._coming.generation:
            self._coming.fault.settle(word)
        elif self._ready.is_set() and word.generation == self.mesh.generation:
            self.mesh.fault.settle(word)
        else:
            self._early = word
            if not self._joined.done():
                self._fail_join(word.to_error())

    def on_barrier(self, call: int, failed: pb.BarrierFailed | None) -> None:
        """See `Listener`."""
        self._barriers.answer(call, failed)

    def on_ended(self, error: errors.PacelineError) -> None:
        """See `Listener`: the coordinator has ended the session, or it cannot be reached any more."""
        self._barriers.fail(error)
        self.mail.put(Lost(error))
        if not self._joined.done():
            self._fail_join(error)
        elif isinstance(error, errors.OrphanedError):
            _log.error("%s; collectives go on without it for as long as all members live", error)
        elif self._ready.is_set():
            # Evicted while cut off, most likely. Nobody will accept what this member sends.
            self.mesh.fault.settle(
                Verdict(
                    self.mesh.generation, ErrorReason.ERROR_REASON_STALE_GENERATION, (self.mesh.rank,), 0, str(error)
                )
            )

    def on_reconnected(self) -> None:
        """See `Listener`: what may have been lost with the old stream goes out again."""
        self.mail.connected = True
        for said in (self._meet, self._finish):
            if said is not None:
                self._send(said)
        for entry in self._barriers.in_flight():
            self._send(pb.SessionRequest(enter_barrier=entry))
        if self._ready.is_set() and self.mesh.fault.verdict is None and self._reported is not None:
            self._send(self._reported)

    def on_disconnected(self) -> None:
        """See `Listener`."""
        self.mail.connected, self.mail.summoned = False, 0

    def on_new_session(self) -> None:
        """See `Listener`: nobody accepts what this member sends in its old generation."""
        self._know_member()
        self._meet = None
        if self._ready.is_set():
            text = "the session has ended: this member was taken for lost while it could not be reached"
            stale = ErrorReason.ERROR_REASON_STALE_GENERATION
            self.mesh.fault.settle(Verdict(self.mesh.generation, stale, (), 0, text))
            self.mail.put(CaughtOut())

    def on_line(self, message: pb.SessionResponse) -> None:
        """See `Listener`."""
        match message.WhichOneof("event"):
            case "running":
                text = (
                    f"this worker is in no view yet: job {self.job!r} is running with {message.running.world_size} "
                    "members, and it enters at its first step of session.steps()"
                )
                self._start(self._learn_members(message.running))
                self._stand_by(text)
            case "summons":
                self.mail.summoned = message.summons.generation
            case "catch_up":
                order = message.catch_up
                base = Tag(order.base.generation, order.base.step)
                self.mail.put(CatchUpAsked(order.generation, base, [read_peer(donor) for donor in order.donors]))
            case "misfit":
                self.mail.put(Misfits(read_peer(message.misfit.donor)))
            case "drain":
                self.mail.draining = message.drain.reason or "somebody asked for it"
            case "dismissed":
                self.mail.put(MayGo(message.dismissed.last))
            case "finished":
                self._finish = None
                self.mail.put(JobDone(message.finished.step))
                self._stand_by(f"job {self.job!r} is done: its last step was {message.finished.step}")

    async def _learn_members(self, running: pb.Running) -> None:
        """Who is in the line that runs without this worker: it is to see that it can reach them all."""
        assert self._control is not None
        self.mail.put(Runs(running.generation, None))
        view = pb.ViewFormed(
            generation=running.generation,
            world_size=running.world_size,
            members_sha256=running.members_sha256,
            pages=running.pages,
        )
        try:
            peers = await fetch_peers(self._control.channel, self.job, view, self._config.call_timeout)
        except errors.PacelineError as error:  # another generation has come, which will be told of too
            _log.info("the members of generation %d cannot be had: %s", view.generation, error)
        else:
            self.mail.put(Runs(running.generation, peers))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stand_by(self, reason: str) -> None:
        """`join` returns without a view: the job goes on, or is done, without this worker."""
        if not self._joined.done():
            self._enter(NoMesh(reason))

    async def _adopt(self, view: pb.ViewFormed) -> None:
        """Makes the links of a view. In `join` the group begins with them; later the training thread moves it there."""
        assert self._control is not None
        mesh: GrpcMesh | None = None
        try:
            peers = await fetch_peers(self._control.channel, self.job, view, self._config.call_timeout)
            await self._protect([parse_endpoint(peer.address) for peer in peers])
        except Exception as error:  # noqa: BLE001  whoever waits in join shall hear of it, whatever it is
            _log.info("the members of generation %d cannot be had: %s", view.generation, error)
            self._fail_join(error)
        else:
            if self._closed or (self._joined.done() and not self._ready.is_set()):  # join has been given up
                return
            fault = Fault(view.generation, view.rank, self._config.verdict_timeout)
            fault.on_suspicion(functools.partial(self._report, view.generation))
            if self._early is not None and self._early.generation == view.generation:
                fault.settle(self._early)
            mesh = GrpcMesh(
                self.job, view.generation, view.rank, peers, fault, self._thread, self._config.failure_timeout
            )
            self._door.enter(mesh)
            facts = {"job": self.job, "rank": view.rank, "world_size": view.world_size, "generation": view.generation}
            tell_launcher("view", {**facts, "pid": os.getpid()})
            _log.info("job %r: rank %d of %d in generation %d", self.job, view.rank, view.world_size, view.generation)
        if not self._joined.done():
            if mesh is not None:
                self._enter(mesh)
            return
        self._coming = mesh
        base = Tag(view.base.generation, view.base.step) if view.HasField("base") else None
        self.mail.put(ViewCame(view.generation, view.rank, base, frozenset(view.newcomers), mesh))

    def _enter(self, mesh: GrpcMesh | NoMesh) -> None:
        """`join` is over: this is where the group begins."""
        assert self._control is not None
        self.mesh = mesh
        self.group = Group(mesh, self._config)
        self.store = CoordinatorStore(self._thread, self._control.channel, self._caller, self._config.call_timeout)
        self._ready.set()
        self._joined.set_result(None)

    def _fail_join(self, error: Exception) -> None:
        if not self._joined.done():
            self._joined.set_exception(error)

    def _report(self, generation: int, suspicion: Suspicion) -> None:
        assert self._control is not None
        if suspicion.relayed or generation != self._control.generation:
            return
        report = pb.Report(
            generation=generation,
            operation=suspicion.operation,
            reason=suspicion.reason,
            accused=suspicion.accused,
            text=suspicion.text[:2000],
        )
        self._reported = pb.SessionRequest(report=report)
        self._thread.loop.call_soon_threadsafe(self._send, self._reported)

    def _send(self, request: pb.SessionRequest) -> None:
        assert self._control is not None
        self._control.send(request)

    def _progress(self) -> pb.Heartbeat:
        if not self._ready.is_set():
            return pb.Heartbeat()
        return heartbeat(*self.group.progress(), self._step, self._step_at)

    async def _protect(self, peers: Sequence[Endpoint]) -> None:
        """Names the sockets that a forked child must let go of, by the IP addresses that the kernel knows them by."""
        endpoints = [self._coordinator, *peers]
        addresses = await resolve({endpoint.host for endpoint in endpoints})
        dialled = {(address, endpoint.port) for endpoint in endpoints for address in addresses[endpoint.host]}
        protect(id(self), listening_port=self._listening_port, dialled=dialled)
