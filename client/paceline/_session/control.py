"""The control stream: keeps one session alive with the coordinator. Runs on the loop; decides nothing about training.

It registers, sends heartbeats and hands the coordinator's messages to a listener. After the stream breaks, it resumes
under the same member id, with backoff and jitter, for `rejoin_timeout`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from paceline import errors
from paceline._base.addresses import CoordinatorAddresses, is_refused
from paceline._base.rpc import (
    aio,
    backoff,
    error_from_status,
    grpc,
    is_other_version,
    is_transient,
    leader_named_by,
    nobody_answers,
)
from paceline._session.connection import CoordinatorChannel, SessionStream, check_tls, open_stream
from paceline.config import Config
from paceline.credentials import Credentials
from paceline_protocol.messages import Message, Spare, ViewFormed
from paceline_protocol.translation import read_message
from pacelinepb.remarks import Remarks
from pacelinepb.v1 import session_pb2 as pb

_log = logging.getLogger("paceline.session")

_BELIEVED = 3
"""Equal refusals in a row after which a refusal is final. The first one may be the answer to a byte that changed on the
way."""

_ATTEMPT_S = 5.0
"""Most seconds for one attempt to resume a session, and for the first attempt to register. Each later attempt may take
twice as long as the one before, because many workers that start together keep a coordinator busy."""

_EACH_S = 1.0
"""The same for the first attempt to register at one of several coordinators, which may be frozen."""

_KNOCK_S = 1.0
"""Seconds in which the coordinator's host must say that nobody listens at the address."""

_OTHER_VERSION_S = 5.0
"""Most seconds until a session is resumed again at a coordinator that speaks none of this worker's versions: it answers
the same until another release runs there. The first member that comes back to that one starts the leases of all, so
nobody pauses for longer than half a lease."""

_LOOK_AGAIN_S = 0.1
"""Seconds between the look that finds the coordinator silent and the look that believes it: enough for grpc's thread to
hand over what has arrived."""


class ControlStream:
    """One session with the coordinator, or with several of which one leads; `progress` returns its heartbeats."""

    def __init__(
        self,
        addresses: CoordinatorAddresses,
        register: pb.Register,
        config: Config,
        listener: ControlListener,
        progress: Callable[[], pb.Heartbeat],
        credentials: Credentials,
        coordinator_returns: bool = True,
    ) -> None:
        self.target = str(addresses)
        self.channel = CoordinatorChannel(addresses, config.failure_timeout, credentials)
        self.registered: pb.Registered | None = None
        self.generation = 0
        self.rejoins = False
        """True if this process comes back as a new member after its session has ended."""
        self._addresses = addresses
        self._epoch = 0  # the highest that was seen
        self._leader: str | None = None  # what a standby has said: see `CoordinatorAddresses.turn`
        self._silent = False  # the last stream ended because nothing came
        self._register = register
        self._config = config
        self._listener = listener
        self._progress = progress
        self._credentials = credentials
        self._returns = coordinator_returns
        self._outgoing: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._left = asyncio.Event()
        self._leaving = False
        self._farewell: pb.SessionRequest | None = None
        self._refusals = _Refusals()
        self._other_versions = Remarks(60.0)
        self._short = 0  # streams in a row that ended before a heartbeat
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout: float) -> None:
        """Registers, and tries again while nobody answers.

        Raises `CoordinatorUnreachable` also if a server at that address is no Paceline coordinator, or if it refuses
        the connection and this coordinator does not come back; `LimitExceeded` if it had no room for another worker,
        all that time.
        """
        start = time.monotonic()
        attempt = 0
        no_room: errors.LimitExceeded | None = None
        while True:
            try:
                patience = _EACH_S if self._addresses.several else _ATTEMPT_S
                give_up = min(start + timeout, time.monotonic() + patience * 2.0 ** min(attempt, 10))
                if attempt and self._addresses.several:
                    await self._change_coordinator(give_up)
                call = await self._connect(pb.SessionRequest(register=self._register), give_up)
                self._task = asyncio.create_task(self._serve_until_over(call))
                return
            except aio.AioRpcError as error:
                typed = error_from_status(error, f"the coordinator at {self.target}")
                last: Exception = typed
                self._leader = leader_named_by(error)
                if isinstance(typed, errors.LimitExceeded):
                    no_room = typed
                elif error.code() is grpc.StatusCode.UNAVAILABLE:  # it is gone; other codes do not tell the cause
                    no_room = None
                if not is_transient(error):
                    final = self._refusals.final(typed)
                    if final is not None or time.monotonic() - start >= timeout:
                        raise final or typed from error
                elif await self._is_gone():
                    raise errors.CoordinatorUnreachable(self._gone_for_good) from error
                elif attempt & (attempt - 1) == 0:  # 0, 1, 2, 4, 8...: it may come up with a wrong certificate later
                    target = str(self._addresses.current)
                    await check_tls(target, self._credentials.files, start + timeout - time.monotonic())
            except TimeoutError:
                last = TimeoutError("no answer")
            except (_Outdated, OSError) as error:  # the name of one of several coordinators does not resolve
                if isinstance(error, errors.PacelineError) or not self._addresses.several:
                    raise
                last = error
            waited = time.monotonic() - start
            if waited >= timeout:
                if no_room is not None:
                    raise no_room
                raise nobody_answers(self.target, waited, str(last)) from last
            await asyncio.sleep(min(backoff(attempt), start + timeout - time.monotonic()))
            attempt += 1

    def send(self, request: pb.SessionRequest) -> None:
        """Queues a message; it goes out in order, after a reconnect too."""
        self._outgoing.put_nowait(request)

    def send_again(self, requests: Sequence[pb.SessionRequest]) -> None:
        """Queues messages of an earlier stream ahead of all that wait, so that they precede a goodbye."""
        waiting = [*requests]
        while not self._outgoing.empty():
            waiting.append(self._outgoing.get_nowait())
        for request in waiting:
            self._outgoing.put_nowait(request)

    def beat(self) -> None:
        """Sends a heartbeat now, beside those that are due. On the loop."""
        self.send(pb.SessionRequest(heartbeat=self._progress()))

    async def leave(self, cause: str, timeout: float) -> None:
        """Says goodbye and waits for the answer, for `timeout` seconds at most; then closes the channel."""
        self._leaving = True
        if self._task is not None and not self._task.done():
            self._farewell = pb.SessionRequest(leave=pb.Leave(cause=cause[:2000], last=self._progress()))
            self.send(self._farewell)
            try:
                await asyncio.wait_for(self._left.wait(), timeout)
            except TimeoutError:
                self._warn("the coordinator at %s did not answer the goodbye within %.1f s", self.target, timeout)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.channel.close()

    async def _connect(self, first: pb.SessionRequest, deadline: float) -> SessionStream:
        """Opens a stream and introduces this member. Returns the stream with `registered` set."""
        metadata = await self._credentials.metadata()
        call, answer = await open_stream(self.channel.newest, first, metadata, deadline - time.monotonic())
        if not answer.HasField("registered"):
            call.cancel()
            raise errors.CoordinatorUnreachable(
                f"{self.target} is not a Paceline coordinator: it did not answer with `registered`"
            )
        if not self._is_current(answer):
            call.cancel()
            raise _Outdated(
                f"{self._addresses.current} does not lead any more: it answers with epoch {answer.epoch}, and this "
                f"worker has seen epoch {self._epoch}"
            )
        self._leader = None
        self.registered = answer.registered
        self._listener.on_registered()
        return call

    async def _serve_until_over(self, call: SessionStream) -> None:
        """Serves a stream; if that fails unexpectedly, logs the error and ends the session."""
        try:
            await self._keep_session(call)
        except Exception as error:  # noqa: BLE001  logged, and the session ends
            _log.exception("the session with %s failed unexpectedly", self.target)
            self._left.set()
            self._listener.on_broken(error)

    async def _end_member_on_failure(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a task that a stream needs besides its reader; if it fails, logs the error and ends this member."""
        try:
            await work()  # made here, since a task that is cancelled before it starts would never await it
        except Exception as error:  # noqa: BLE001  logged, and this member ends
            _log.exception("the stream to %s failed unexpectedly", self.target)
            self._listener.on_broken(error)

    async def _keep_session(self, call: SessionStream) -> None:
        while not self._left.is_set():
            began = time.monotonic()
            error = await self._serve(call)
            if self._left.is_set():
                return
            self._listener.on_disconnected()
            self._short += 1
            if time.monotonic() - began > self._config.heartbeat_interval:
                self._short = 0
                self._refusals.forget()
            former = self.registered.member_id if self.registered is not None else ""
            first = self._resume_request()
            if error is not None and not is_transient(error):
                final = self._refusals.final(error_from_status(error, f"the coordinator at {self.target}"))
                if final is not None and not self._may_rejoin(final):
                    self._end_session(final)
                    return
                if final is not None:
                    first = self._register_again()
            resumed = await self._reconnect(first)
            if resumed is None:
                return
            call = resumed
            if self.registered is not None and self.registered.member_id != former:
                self._listener.on_new_session()
            self._listener.on_reconnected()
            if self._farewell is not None:
                self.send(self._farewell)

    async def _serve(self, call: SessionStream) -> aio.AioRpcError | None:
        """Serves one stream until it ends; returns its status, None for an orderly end."""
        writer = asyncio.create_task(self._end_member_on_failure(functools.partial(self._write, call)))
        beat = asyncio.create_task(self._end_member_on_failure(self._send_heartbeats))
        assert self.registered is not None
        silence = self.registered.longest_silence.ToTimedelta().total_seconds() or None
        self._silent = False
        try:
            while (message := await _next_message(call, silence)) is not None:
                if not self._is_current(message):
                    self._silent = True  # another coordinator leads
                    return None
                self._hand_on(message)
                if self._left.is_set():
                    return None
        except aio.AioRpcError as error:
            return error
        except TimeoutError:
            self._silent = True
        finally:
            writer.cancel()
            beat.cancel()
            call.cancel()
        return None

    def _is_current(self, message: pb.SessionResponse) -> bool:
        """Checks the epoch of a message. A coordinator with a lower epoch than this member has seen leads no more.

        Its orders may rest on what was true before another one took over.
        """
        if message.epoch < self._epoch:
            return False
        self._epoch = message.epoch
        return True

    async def _change_coordinator(self, deadline: float) -> None:
        """Goes to the coordinator that a standby has named, or else to the next one.

        Raises OSError if its name does not resolve.
        """
        leader, self._leader = self._leader, None
        await self.channel.renew(deadline - time.monotonic(), leader)

    async def _write(self, call: SessionStream) -> None:
        while True:
            request = await self._outgoing.get()
            try:
                await call.write(request)
            except (aio.AioRpcError, asyncio.InvalidStateError):
                if not request.HasField("heartbeat"):
                    self.send_again([request])
                return  # the reader learns how the stream ended

    async def _send_heartbeats(self) -> None:
        assert self.registered is not None
        interval = self.registered.heartbeat_interval.ToTimedelta().total_seconds()
        while True:
            await asyncio.sleep(interval)
            self.beat()

    def _hand_on(self, response: pb.SessionResponse) -> None:
        match response.WhichOneof("event"):
            case "new_door_secret":
                assert self.registered is not None
                self.registered.door_secret = response.new_door_secret.door_secret
                self._listener.on_registered()
            case "asked":
                self._listener.on_asked(response.asked)
            case "left":
                self._left.set()
                if not self._leaving:
                    self._listener.on_closed()
        message = read_message(response)
        if isinstance(message, ViewFormed):
            self.generation = message.generation
        elif isinstance(message, Spare):
            self.generation = max(self.generation, message.generation)
        if message is not None:
            self._listener.on_message(message)

    def _resume_request(self) -> pb.SessionRequest:
        assert self.registered is not None
        return pb.SessionRequest(
            resume=pb.Resume(
                job=self._register.job,
                member_id=self.registered.member_id,
                session_token=self.registered.session_token,
                generation=self.generation,
                protocol_version=self._register.protocol_version,
                newest_protocol_version=self._register.newest_protocol_version,
            )
        )

    def _may_rejoin(self, error: errors.PacelineError) -> bool:
        """True if a new session follows after one that ended with this error.

        The coordinator does not store candidates, so after a restart they are new to it. A member of a line brings its
        state back.
        """
        return isinstance(error, errors.SessionClosed) and self._may_be_new

    @property
    def _may_be_new(self) -> bool:
        """True if this process may come back as another member."""
        return (self.generation == 0 or self.rejoins) and not self._leaving

    def _register_again(self) -> pb.SessionRequest:
        self._register.generation_floor = max(self._register.generation_floor, self.generation)
        if self.generation:
            self._register.ClearField("launch")  # the others have been waited for, and some may have ended since
        request = pb.SessionRequest(register=self._register)
        assert self.registered is not None
        request.register.former_member_id = self.registered.member_id
        request.register.former_session_token = self.registered.session_token
        self.generation = 0
        self._refusals.forget()
        while not self._outgoing.empty():  # the old member's messages do not concern the new one
            self._outgoing.get_nowait()
        return request

    async def _reconnect(self, request: pb.SessionRequest) -> SessionStream | None:
        """Resumes the session, or opens a new one; returns None if the session is over."""
        if await self._is_gone():  # nobody is left to say goodbye to, so a leaving member just ends
            self._end_session(errors.OrphanedError(self._gone_for_good))
            return None
        self._warn("lost the stream to the coordinator at %s; reconnecting", self.target)
        start = time.monotonic()
        deadline = start + self._config.rejoin_timeout
        last = "no answer"
        began = start
        leads = not self._silent  # the coordinator that is tried leads, as far as this member knows
        patiently = False
        for attempt in range(1 << 30):
            # The pauses grow from one round of all addresses to the next: the one that takes over is not there yet.
            pause = min(backoff(attempt // len(self._addresses) + self._short), self._config.heartbeat_interval)
            if patiently:
                pause = min(_OTHER_VERSION_S, self._config.failure_timeout / 2, deadline - began)
            await asyncio.sleep(began + pause - time.monotonic())
            began, patiently = time.monotonic(), False
            most = 2 * _EACH_S if self._addresses.several else _ATTEMPT_S  # another one may lead meanwhile
            patience = min(most, self._config.failure_timeout / 3 * 2.0 ** min(attempt, 10))
            give_up = min(deadline, began + patience)
            try:
                request = await self._with_new_address(request, give_up)
                if not leads:  # it may have another address when it comes back
                    await self._change_coordinator(give_up)
                leads = False
                call = await self._connect(request, give_up)
            except aio.AioRpcError as error:
                typed = error_from_status(error, f"the coordinator at {self.target}")
                last = str(typed)
                self._leader = leader_named_by(error)
                # One that speaks other versions is as good as away: an operator has changed its release, and may again.
                patiently = is_other_version(error) and request.HasField("resume")
                if patiently and self._other_versions.count("", began):
                    self._warn("this worker goes on without a coordinator: %s", typed)
                final = None if patiently or is_transient(error) else self._refusals.final(typed)
                leads = isinstance(typed, errors.SessionClosed)  # a standby does not say that
                if final is not None and self._may_rejoin(final) and request.HasField("resume"):
                    request = self._register_again()
                elif final is not None:
                    self._end_session(final)
                    return None
                elif await self._is_gone():
                    self._end_session(errors.OrphanedError(self._gone_for_good))
                    return None
            except TimeoutError:
                pass  # one attempt timed out; the deadline below ends the loop
            except (_Nowhere, _Outdated) as error:
                last = str(error)
            except errors.PacelineError as error:
                self._end_session(error)
                return None
            except OSError as error:  # its name does not resolve
                last = str(error)
            else:
                self._warn("reconnected to the coordinator after %.1f s", time.monotonic() - start)
                return call
            if time.monotonic() >= deadline:
                self._end_session(
                    errors.OrphanedError(
                        f"the coordinator at {self.target} did not come back in {self._config.rejoin_timeout:.0f} s; "
                        f"the last time: {last}"
                    )
                )
                return None
        return None

    async def _is_gone(self) -> bool:
        """True if the coordinator has ended for good: it does not come back, and its address refuses connections.

        A coordinator announces its address only after it listens there, so a refusal never means that it is too early.
        """
        return not self._returns and await is_refused(self._addresses.current, _KNOCK_S)

    @property
    def _gone_for_good(self) -> str:
        return f"the coordinator at {self.target} is gone: connections to it are refused, and it will not come back"

    async def _with_new_address(self, request: pb.SessionRequest, deadline: float) -> pb.SessionRequest:
        """Returns the request that introduces this member: a new registration if its address has changed.

        A session cannot move to a new address, because other members have the old address in their view. Raises
        `_Nowhere` if peers cannot reach this worker at any address yet.
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

    def _warn(self, text: str, *arguments: object) -> None:
        """Logs a warning; only at level INFO if the coordinator ends with a member, since links report that loss."""
        _log.log(logging.WARNING if self._returns else logging.INFO, text, *arguments)

    def _end_session(self, error: errors.PacelineError) -> None:
        self._left.set()
        if not self._leaving:
            self._listener.on_ended(error)


async def _next_message(call: SessionStream, silence: float | None) -> pb.SessionResponse | None:
    """Returns the next message of a stream; None at its end.

    It looks twice before it believes that nothing has come in `silence` seconds, and raises TimeoutError: after a stall
    of this process the time is up before the loop has taken in what has arrived meanwhile.
    """
    if silence is None:
        return await call.read()
    read = asyncio.create_task(call.read())
    try:
        for patience in (silence, _LOOK_AGAIN_S):
            await asyncio.wait({read}, timeout=patience)
            if read.done():
                return read.result()
        raise TimeoutError
    finally:
        read.cancel()


class _Nowhere(Exception):
    """Peers cannot reach this worker at any address yet, but an address may come."""


class _Outdated(Exception):
    """A coordinator answers that no longer leads."""


class _Refusals:
    """Counts one session's refusals in a row."""

    def __init__(self) -> None:
        self._first: errors.PacelineError | None = None
        self._count = 0

    def forget(self) -> None:
        """Starts again from zero, because the coordinator has accepted a message."""
        self._first, self._count = None, 0

    def final(self, error: errors.PacelineError) -> errors.PacelineError | None:
        """Counts a refusal. Returns the first of the row, which says best why, once enough of one type have come."""
        if isinstance(error, errors.ReplicaLost):  # the session is not resumed: the mate does not come back
            return error
        if self._first is None or type(self._first) is not type(error):
            self._first, self._count = error, 0
        self._count += 1
        return self._first if self._count >= _BELIEVED else None


class ControlListener(Protocol):
    """Handles events of a control stream, on the loop thread; the methods must not block."""

    def on_registered(self) -> None:
        """Is called when `registered` is set or has changed: after each connection, and when a line has ended."""

    def on_message(self, message: Message) -> None:
        """Is called with each message of the coordinator about training."""

    def on_ended(self, error: errors.PacelineError) -> None:
        """Is called when the session is over for good."""

    def on_closed(self) -> None:
        """Is called when the coordinator has shut down for good. The session ends without a goodbye."""

    def on_broken(self, error: BaseException) -> None:
        """Is called when the session has failed unexpectedly, so that this member cannot go on."""

    def on_reconnected(self) -> None:
        """Is called when a broken stream was resumed: requests without an answer must be sent again."""

    def on_disconnected(self) -> None:
        """Is called when the stream broke."""

    def on_new_session(self) -> None:
        """Is called when the old session has ended and this worker is a new member, in no view."""

    async def on_away(self, timeout: float) -> str:
        """Returns this member's new address, "host:port", before it is introduced again; empty if it is unchanged.

        Raises `CoordinatorUnreachable` or `LinkUnavailable` if there is no address after `timeout` seconds.
        """

    def on_asked(self, asked: pb.Asked) -> None:
        """Is called when an operator asks this member something."""
