"""The connection to the coordinator: its channel, the stream of a session on it, and why TLS with it fails.

While a name does not resolve, gRPC looks it up again only after a pause that grows to many seconds and cannot be set.
A new channel looks it up at once, so each attempt to reach the coordinator makes a new channel. gRPC does that look-up
only once, and it takes long if the query is lost; so the channel is made only after the name has resolved.

gRPC reports every failed handshake as an unavailable address. So after a first failed attempt, a thread repeats the
handshake with Python's own `ssl`. Its result is final: waiting does not change certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import DecodeError

from paceline._base.addresses import CoordinatorAddresses, look_up, look_up_within, parse_endpoint
from paceline._base.rpc import aio, channel_options, grpc, untyped
from paceline._base.tls import TlsFiles, make_context, what_is_wrong
from paceline.credentials import Credentials
from paceline.errors import TlsFailed
from pacelinepb import checks
from pacelinepb.v1 import session_pb2 as pb

T = TypeVar("T")


class CoordinatorChannel:
    """The channel of one session to its coordinator, or to several of which one leads; used on the loop.

    A connection ends after `failure_timeout` seconds without an acknowledgement. `newest` is the present channel: use
    `call` for unary calls, because the channel may be replaced during one.
    """

    def __init__(self, addresses: CoordinatorAddresses, failure_timeout: float, credentials: Credentials) -> None:
        self._addresses = addresses
        self._failure_timeout = failure_timeout
        self._credentials = credentials
        self._closing: set[asyncio.Task[None]] = set()
        self.newest = credentials.coordinator_channel(str(addresses.current), channel_options(failure_timeout))

    async def renew(self, timeout: float, leader: str | None = None) -> None:
        """Replaces the channel by a new one, which looks up the coordinator's present address.

        `leader` is what a standby has said; see `CoordinatorAddresses.turn`. Raises OSError if the name does not
        resolve within `timeout` seconds.
        """
        self._addresses.turn(leader)
        await look_up_within(self._addresses.current.host, timeout)
        old = self.newest
        options = channel_options(self._failure_timeout, alone=True)
        self.newest = self._credentials.coordinator_channel(str(self._addresses.current), options)
        task = asyncio.ensure_future(old.close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def call(self, make: Callable[[aio.Channel], Awaitable[T]]) -> T:
        """Makes a call that may be repeated, and repeats it if its channel is replaced during the call.

        `make` limits the remaining time itself. CancelledError also means that the session is over.
        """
        while True:
            channel = self.newest
            try:
                return await make(channel)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if channel is self.newest or (task is not None and task.cancelling()):
                    raise

    async def close(self) -> None:
        """Closes all channels, which ends open calls."""
        await asyncio.gather(*self._closing, self.newest.close(None))


_LEAST_S = 0.1


class SessionStream:
    """The stream of a session, which adds a check to each message sent and verifies each message received."""

    def __init__(self, channel: aio.Channel, metadata: aio.Metadata) -> None:
        # No serialisers: the check is computed over the bytes as they were sent.
        method = untyped(channel.stream_stream)("/pacelinepb.v1.SessionService/Session")
        self._call: aio.StreamStreamCall[bytes, bytes] = method(metadata=metadata)
        self._read = self._written = 0

    async def write(self, request: pb.SessionRequest) -> None:
        """Sends a message, for one task at a time; AioRpcError or InvalidStateError if the stream has ended."""
        data = checks.with_check(request.SerializeToString(), self._written)
        self._written += 1
        await self._call.write(data)

    async def read(self) -> pb.SessionResponse | None:
        """Returns the next message; None at the end of the stream.

        Raises AioRpcError if the stream was refused or broke. The status DATA_LOSS is this side's own: a message has
        changed on the way.
        """
        data: object = await self._call.read()
        if not isinstance(data, bytes):
            return None
        if not checks.is_sound(data, self._read):
            raise _damaged("a message of the coordinator has changed, or was lost, on the way")
        self._read += 1
        try:
            return pb.SessionResponse.FromString(data)
        except DecodeError:
            raise _damaged("the coordinator sent something that is not a message of a session") from None

    def cancel(self) -> None:
        """Ends the stream."""
        self._call.cancel()

    async def status(self) -> aio.AioRpcError:
        """Returns the status of a stream that ended without an answer, as the exception that grpc would raise."""
        call = self._call
        leading, trailing = await call.initial_metadata(), await call.trailing_metadata()
        return aio.AioRpcError(await call.code(), leading, trailing, await call.details(), None)


def _damaged(text: str) -> aio.AioRpcError:
    return aio.AioRpcError(grpc.StatusCode.DATA_LOSS, aio.Metadata(), aio.Metadata(), text, None)


async def open_stream(
    channel: aio.Channel, first: pb.SessionRequest, metadata: aio.Metadata, timeout: float
) -> tuple[SessionStream, pb.SessionResponse]:
    """Opens a stream and introduces a member; returns the stream and the answer.

    Waits a tenth of a second at least. Raises TimeoutError without an answer, and AioRpcError if the coordinator
    refused or cannot be reached, or its answer makes no sense.
    """
    stream = SessionStream(channel, metadata)
    answer = None
    try:
        async with asyncio.timeout(max(_LEAST_S, timeout)):
            await stream.write(first)
            answer = await stream.read()
    except asyncio.InvalidStateError:
        pass  # refused before the write: the status says why
    except (TimeoutError, aio.AioRpcError):
        stream.cancel()
        raise
    if answer is None:
        raise await stream.status()
    return stream, answer


_PROBE_S = 2.0
"""Seconds for each message of a handshake. A host that is slower proves nothing."""

_UNINVITED = "it demands a certificate from every caller: set PACELINE_TLS_CERT and PACELINE_TLS_KEY"

_UNWELCOME = (
    "it does not accept our certificate (PACELINE_TLS_CERT): the certificate has expired, is from another authority "
    "than the coordinator's, or is not made for callers"
)

_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_RECORD")
"""OpenSSL's errors if it reads an HTTP/2 frame in place of a handshake."""


_ADDRESSES = 2
"""Most addresses of one name that are tried."""

_LOOKS, _PAUSE_S = 2, 0.1
"""A server that hangs up after the handshake may be stopping; if it does so again, it refuses this worker."""


async def check_tls(target: str, files: TlsFiles | None, timeout: float) -> None:
    """Finds out whether TLS is the reason that a coordinator does not answer.

    The certificate should name the host of `target`, "host:port". Raises `TlsFailed` if no connection with these
    settings will succeed, and nothing if nobody answers or the cause is unclear.
    """
    endpoint = parse_endpoint(target)
    fault: str | None = None
    # An OSError: the name does not resolve, or time is up (TimeoutError is one).
    with contextlib.suppress(OSError):
        async with asyncio.timeout(timeout):
            for _, where in (await look_up(endpoint.host))[:_ADDRESSES]:
                fault = await asyncio.to_thread(_find_fault, str(where[0]), endpoint.port, endpoint.host, files)
                if fault is not None:
                    break
    if fault is not None:
        raise TlsFailed(f"no connection with the coordinator at {target}: {fault}")


def _find_fault(ip: str, port: int, host: str, files: TlsFiles | None) -> str | None:
    fault: str | None = None
    try:
        for look in range(_LOOKS):
            time.sleep(look * _PAUSE_S)
            with socket.create_connection((ip, port), timeout=_PROBE_S) as connection:
                fault = _shakes_hands(connection) if files is None else _try_handshake(connection, host, files)
            if fault not in (_UNINVITED, _UNWELCOME):
                break
    except OSError:  # refused, silent or cut off: TLS is not the reason
        return None
    return fault


def _shakes_hands(connection: socket.socket) -> str | None:
    """Tests whether a server that this process talks to without TLS speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection).close()
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):  # only a TLS server sends an alert
            return None
    return "it uses TLS, but this process does not: set PACELINE_TLS_CA, and for workers PACELINE_TLS_CERT and _KEY"


def _try_handshake(connection: socket.socket, host: str, files: TlsFiles) -> str | None:
    context = make_context(files)
    context.set_alpn_protocols(["h2"])
    try:
        secured = context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate {what_is_wrong(error, host)}"
    except ssl.SSLError as error:
        if error.reason in _NOT_TLS:
            return "it does not use TLS, but this process does: PACELINE_TLS_CA is set"
        return _refusal(files) if "ALERT" in (error.reason or "") else None
    with secured:
        try:
            # With TLS 1.3 the server's verdict on our certificate comes after the handshake. An HTTP/2 server that
            # accepts it speaks first; grpc's hangs up on a caller that it refuses, without the usual alert.
            welcome = secured.recv(1)
        except (ssl.SSLError, ConnectionError):
            welcome = b""
    return None if welcome else _refusal(files)


def _refusal(files: TlsFiles) -> str:
    return _UNINVITED if files.cert is None else _UNWELCOME
