"""The control stream: keeps one session alive with the coordinator. Runs on the loop; decides nothing about training.

Registers, sends heartbeats, hands what the coordinator pushes to a listener, and after a broken stream resumes under
the same member id, with backoff and jitter, for `rejoin_timeout`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from paceline import errors
from paceline._grpc import aio
from paceline.config import Config
from paceline.credentials import Credentials
from paceline.session.channel import CoordinatorChannel
from paceline.session.handshake import check_tls
from paceline.session.listener import Listener
from paceline.session.stream import SessionStream, open_stream
from paceline.session.wire import duration, error_from_status, is_transient
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["ControlStream"]

_log = logging.getLogger("paceline.session")

BACKOFF_FIRST, BACKOFF_MOST = 0.05, 1.0
"""Seconds from one attempt to connect to the next: doubled each time, with jitter."""

_ATTEMPT_S = 5.0
"""For one of them, while a session is to be taken up again."""


class ControlStream:
    """One session with the coordinator.

    Args:
        target: the coordinator, "host:port".
        register: how to introduce oneself.
        config: timeouts.
        listener: hears what the coordinator pushes.
        progress: returns the heartbeat to send.
        credentials: by what this worker and the coordinator know each other.
    """

    def __init__(
        self,
        target: str,
        register: pb.Register,
        config: Config,
        listener: Listener,
        progress: Callable[[], pb.Heartbeat],
        credentials: Credentials,
    ) -> None:
        self.target = target
        self.channel = CoordinatorChannel(target, config.failure_timeout, credentials)
        self.registered: pb.Registered | None = None
        self.generation = 0
        self.rejoins = False
        """True if this process comes back as a new member when its session has ended."""
        self._register = register
        self._config = config
        self._listener = listener
        self._progress = progress
        self._credentials = credentials
        self._outgoing: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._left = asyncio.Event()
        self._leaving = False
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout: float) -> None:
        """Registers, trying again while nobody answers.

        Raises:
            CoordinatorUnreachable: nobody answered in time, or whoever answers is no Paceline coordinator.
            TlsFailed: it will never answer like this.
            PacelineError: the coordinator refused.
        """
        start = time.monotonic()
        attempt = 0
        while True:
            try:
                call = await self._connect(pb.SessionRequest(register=self._register), start + timeout)
                self._task = asyncio.create_task(self._guard(call))
                return
            except aio.AioRpcError as error:
                typed = error_from_status(error, f"the coordinator at {self.target}")
                if not is_transient(error):
                    raise typed from error
                last: Exception = typed
                if attempt & (attempt - 1) == 0:  # 0, 1, 2, 4, 8...: it may come up with a wrong certificate later
                    await check_tls(self.target, self._credentials.files, start + timeout - time.monotonic())
            except TimeoutError:
                last = TimeoutError("no answer")
            waited = time.monotonic() - start
            if waited >= timeout:
                raise errors.CoordinatorUnreachable(
                    f"no coordinator answers at {self.target}: tried {attempt + 1} times in {waited:.1f} s; "
                    f"the last time: {last}. Is `paceline coordinator --listen {self.target}` running there?"
                ) from last
            await asyncio.sleep(min(_backoff(attempt), start + timeout - time.monotonic()))
            attempt += 1

    def send(self, request: pb.SessionRequest) -> None:
        """Queues a message; it goes out in order, after a reconnect too."""
        self._outgoing.put_nowait(request)

    async def leave(self, cause: str, timeout: float) -> None:
        """Says goodbye and waits for the answer, for `timeout` seconds at most; then closes the channel."""
        self._leaving = True
        if self._task is not None and not self._task.done():
            self.send(pb.SessionRequest(leave=pb.Leave(cause=cause[:2000])))
            try:
                await asyncio.wait_for(self._left.wait(), timeout)
            except TimeoutError:
                _log.warning("the coordinator at %s did not answer the goodbye within %.1f s", self.target, timeout)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.channel.close()

    async def _connect(self, first: pb.SessionRequest, deadline: float) -> SessionStream:
        """Opens a stream and introduces this member. Returns it with `registered` set."""
        metadata = await self._credentials.metadata()
        call, answer = await open_stream(self.channel.newest, first, metadata, deadline - time.monotonic())
        if not answer.HasField("registered"):
            call.cancel()
            raise errors.CoordinatorUnreachable(
                f"{self.target} is no Paceline coordinator: it did not say `registered`"
            )
        self.registered = answer.registered
        return call

    async def _guard(self, call: SessionStream) -> None:
        """A session must not die unseen, whatever goes wrong here."""
        try:
            await self._run(call)
        except Exception as error:  # noqa: BLE001  logged, and the session ends
            _log.exception("the session with %s failed in a way that it should not", self.target)
            self._end(errors.PacelineError(f"the session failed: {type(error).__name__}: {error}"))

    async def _run(self, call: SessionStream) -> None:
        while not self._left.is_set():
            error = await self._serve(call)
            if self._left.is_set():
                return
            self._listener.on_disconnected()
            former = self.registered.member_id if self.registered is not None else ""
            first = self._resume_request()
            if error is not None and not is_transient(error):
                typed = error_from_status(error, f"the coordinator at {self.target}")
                if not self._may_rejoin(typed):
                    self._end(typed)
                    return
                first = self._register_again()
            resumed = await self._reconnect(first)
            if resumed is None:
                return
            call = resumed
            if self.registered is not None and self.registered.member_id != former:
                self._listener.on_new_session()
            self._listener.on_reconnected()

    async def _serve(self, call: SessionStream) -> aio.AioRpcError | None:
        """Serves one stream until it ends; returns the status it ended with, None for a plain end."""
        writer = asyncio.create_task(self._write(call))
        beat = asyncio.create_task(self._beat())
        try:
            while isinstance(message := await call.read(), pb.SessionResponse):
                self._dispatch(message)
                if self._left.is_set():
                    return None
        except aio.AioRpcError as error:
            return error
        finally:
            writer.cancel()
            beat.cancel()
            call.cancel()
        return None

    async def _write(self, call: SessionStream) -> None:
        while True:
            request = await self._outgoing.get()
            try:
                await call.write(request)
            except (aio.AioRpcError, asyncio.InvalidStateError):
                if not request.HasField("heartbeat"):
                    self._requeue_first(request)
                return  # the reader learns how the stream ended

    def _requeue_first(self, request: pb.SessionRequest) -> None:
        waiting = [request]
        while not self._outgoing.empty():
            waiting.append(self._outgoing.get_nowait())
        for item in waiting:
            self._outgoing.put_nowait(item)

    async def _beat(self) -> None:
        assert self.registered is not None
        interval = self.registered.heartbeat_interval.ToTimedelta().total_seconds()
        while True:
            await asyncio.sleep(interval)
            self.send(pb.SessionRequest(heartbeat=self._progress()))

    def _dispatch(self, message: pb.SessionResponse) -> None:
        kind = message.WhichOneof("event")
        if kind == "view_formed":
            self.generation = message.view_formed.generation
            self._listener.on_view(message.view_formed)
        elif kind == "verdict":
            self._listener.on_verdict(message.verdict)
        elif kind == "waiting":
            self._listener.on_waiting(message.waiting.reason)
        elif kind == "barrier_passed":
            self._listener.on_barrier(message.barrier_passed.call, None)
        elif kind == "barrier_failed":
            self._listener.on_barrier(message.barrier_failed.call, message.barrier_failed)
        elif kind == "left":
            self._left.set()
        else:
            self._listener.on_line(message)

    def _resume_request(self) -> pb.SessionRequest:
        assert self.registered is not None
        return pb.SessionRequest(
            resume=pb.Resume(
                job=self._register.job,
                member_id=self.registered.member_id,
                session_token=self.registered.session_token,
                generation=self.generation,
                protocol_version=PROTOCOL_VERSION,
            )
        )

    def _may_rejoin(self, error: errors.PacelineError) -> bool:
        """True if a session that ended like this is followed by another.

        Candidates are not stored: to a coordinator that was started again they are new. A member of a line brings back
        what it holds.
        """
        return isinstance(error, errors.SessionClosed) and self._may_be_new

    @property
    def _may_be_new(self) -> bool:
        """True if this process may come back as another member."""
        return (self.generation == 0 or self.rejoins) and not self._leaving

    def _register_again(self) -> pb.SessionRequest:
        request = pb.SessionRequest(register=self._register)
        assert self.registered is not None
        request.register.former_member_id = self.registered.member_id
        request.register.former_session_token = self.registered.session_token
        request.register.generation_floor = max(request.register.generation_floor, self.generation)
        self.generation = 0
        while not self._outgoing.empty():  # what the old member had to say is of no use to the new one
            self._outgoing.get_nowait()
        return request

    async def _reconnect(self, request: pb.SessionRequest) -> SessionStream | None:
        """Takes the session up again, or a new one; None when that is over."""
        _log.warning("lost the stream to the coordinator at %s; reconnecting", self.target)
        start = time.monotonic()
        deadline = start + self._config.rejoin_timeout
        last = "no answer"
        began = start
        for attempt in range(1 << 30):
            pause = min(_backoff(attempt), self._config.heartbeat_interval)
            await asyncio.sleep(began + pause - time.monotonic())
            began = time.monotonic()
            give_up = min(deadline, began + _ATTEMPT_S)
            try:
                request = await self._moved(request, give_up)
                if attempt:  # the coordinator did not answer at once: it may be at another address when it comes back
                    await self.channel.renew(give_up - time.monotonic())
                call = await self._connect(request, give_up)
            except aio.AioRpcError as error:
                typed = error_from_status(error, f"the coordinator at {self.target}")
                if self._may_rejoin(typed) and request.HasField("resume"):
                    request = self._register_again()
                elif not is_transient(error):
                    self._end(typed)
                    return None
                last = str(typed)
            except TimeoutError:
                pass  # this attempt; the deadline below ends them
            except _Nowhere as error:
                last = str(error)
            except errors.PacelineError as error:
                self._end(error)
                return None
            except OSError as error:  # its name does not resolve
                last = str(error)
            else:
                _log.warning("reconnected to the coordinator after %.1f s", time.monotonic() - start)
                return call
            if time.monotonic() >= deadline:
                self._end(
                    errors.OrphanedError(
                        f"the coordinator at {self.target} did not come back in {self._config.rejoin_timeout:.0f} s; "
                        f"the last time: {last}"
                    )
                )
                return None
        return None

    async def _moved(self, request: pb.SessionRequest, deadline: float) -> pb.SessionRequest:
        """How to introduce this member: anew if peers reach it at another address than before.

        A session cannot take its address along: other members have it in their view.

        Raises:
            _Nowhere: they reach it nowhere yet.
        """
        if not self._may_be_new:
            return request
        try:
            address = await self._listener.on_away(deadline - time.monotonic())
        except (errors.CoordinatorUnreachable, errors.LinkUnavailable) as error:
            raise _Nowhere(str(error)) from error
        if not address:
            return request
        self._register.address = address
        return self._register_again()

    def _end(self, error: errors.PacelineError) -> None:
        self._left.set()
        if not self._leaving:
            self._listener.on_ended(error)


class _Nowhere(Exception):
    """There is no address at which peers reach this worker; it may come."""


def _backoff(attempt: int) -> float:
    return random.uniform(0.5, 1.0) * min(BACKOFF_MOST, BACKOFF_FIRST * 2.0 ** min(attempt, 10))


def heartbeat(operation: int, since: float, inside: bool, step: int, step_at: float) -> pb.Heartbeat:
    """A heartbeat from a group's progress and the last step's word (times are `time.monotonic()` values)."""
    now = time.monotonic()
    return pb.Heartbeat(
        operation=operation,
        since=duration(max(0.0, now - since)),
        inside=inside,
        step=step,
        step_since=duration(max(0.0, now - step_at)),
    )
