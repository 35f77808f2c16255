"""The HTTP server: listens on the coordinator's loop, beside its gRPC server, with the same certificates.

*Connections.* A connection has one of `most_connections` places from its first moment. If one more comes, the address
with the most places loses its oldest connection: one that is still in the handshake, has sent half of a request, has
been idle or does not take its answer. So whoever comes is served, health checks above all. A stream of the page holds
no place: `stream` bounds their number.

A connection may send `MOST_BYTES` in its life, so that requests which wait behind another take little memory. From half
of that on each answer closes the connection and says so: a client that waits for each answer is never cut off.

*Logs.* Whoever sends what is no HTTP gets an answer, and the log a line about it once in `remark_s`. Neither repeats
any of it: a token that was mangled on its way is in it, too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from paceline_server.dispatcher import Dispatcher
from paceline_server.limits import Places, payer, peer_of
from paceline_server.listening import check_free, targets_of
from paceline_server.security.tls import CertificateKeeper
from paceline_server.security.token_file import TokenKeeper
from paceline_server.web.routes import Routes, error_answer
from paceline_server.web.web_limits import USUAL, WebLimits
from pacelinepb.remarks import Remarks

_log = logging.getLogger(__name__)

MOST_BYTES = 192 << 10
"""The most bytes that one connection may send: some 400 requests, or the longest body and a hundred. aiohttp holds 32
requests for each connection, which take about twice their bytes, but 75 times those of empty headers."""

_MOST_HEADERS = 64
"""The most headers of a request: browsers and proxies together send some 30."""

_STOP_S = 0.5
"""Seconds for answers in progress when the coordinator stops."""

_BACKLOG = 1024
"""Connections that can wait in the kernel."""

_RECOVER_S = 1.0
"""Seconds to wait when the process has no descriptors left."""


class HttpServer:
    """A server of the page, metrics and jobs; port 0 takes a free one, and `Routes` says what `names` are."""

    def __init__(
        self,
        address: str,
        dispatcher: Dispatcher,
        tokens: TokenKeeper | None,
        certificates: CertificateKeeper | None,
        *,
        names: frozenset[str] | None,
        limits: WebLimits = USUAL,
    ) -> None:
        self._address = address
        self._certificates = certificates
        self._limits = limits
        self._routes = Routes(dispatcher, tokens, certificates, names=names, streaming=self._streaming, limits=limits)
        application = self._routes.application()
        application.middlewares.insert(0, _close_in_time)
        self._runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=_STOP_S)
        self._listening: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._context: ssl.SSLContext | None = None
        self._places: Places[asyncio.Task[None]] = Places(limits.most_connections)
        dispatcher.vitals.places["connections"] = self._places
        self._remarks = Remarks(limits.remark_s)
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listens; returns the URL of the page, or raises `PortInUse`."""
        host, _, port = self._address.rpartition(":")
        bound = int(port)
        targets = await targets_of(self._address, host.strip("[]"), bound)
        check_free(self._address, targets)
        await self._runner.setup()
        self._context = None if self._certificates is None else _context(self._certificates)
        for family, target in dict.fromkeys(targets):
            listening = socket.create_server((target[0], bound, *target[2:]), family=family, backlog=_BACKLOG)
            listening.setblocking(False)
            self._listening.append(listening)
            self._accepting.append(asyncio.create_task(self._accept(listening)))
            bound = listening.getsockname()[1]
        return f"{'http' if self._context is None else 'https'}://{host}:{bound}/"

    @property
    def listening(self) -> list[tuple[str, int]]:
        """The IP addresses and ports at which it listens."""
        return [each.getsockname()[:2] for each in self._listening]

    async def stop(self) -> None:
        """Ends all streams, lets answers in progress end, and closes all connections."""
        await self._routes.broadcasts.close()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listening in self._listening:
            listening.close()
        await self._runner.cleanup()
        for task in self._connections:  # those in a handshake
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        """Accepts one connection in each round of the loop, so that a flood of them does not hold up all else."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except ConnectionAbortedError:  # the caller has gone
                continue
            except OSError as error:
                if self._remarks.count("accept", loop.time()):
                    _log.warning("cannot accept HTTP connections: %s", error.strerror)
                await asyncio.sleep(_RECOVER_S)
                continue
            who = payer(None, None, peer_of(address[0]))
            task = asyncio.create_task(self._serve(accepted))
            task.add_done_callback(partial(self._left, accepted))
            self._connections.add(task)
            self._take(who, task)
            await asyncio.sleep(0)

    async def _serve(self, accepted: socket.socket) -> None:
        """Serves a connection until it ends or must give way."""
        server, task = self._runner.server, asyncio.current_task()
        assert server is not None
        assert task is not None
        connection = _Connection(server, task, self._remarks, self._limits)
        patience = None if self._context is None else self._limits.handshake_s
        with suppress(OSError):  # the handshake has failed, or took too long
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=patience
            )
            try:
                await connection.ended
            finally:
                transport.abort()

    def _left(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._places.free(task)
        self._connections.discard(task)
        accepted.close()  # it is open still if the task has not begun

    def _take(self, who: str, task: asyncio.Task[None]) -> None:
        if (oldest := self._places.take(who, task)) is not None:
            oldest.cancel()

    @contextmanager
    def _streaming(self, request: web.Request) -> Iterator[None]:
        """Frees the place of a connection for as long as it is a stream."""
        connection = request.protocol
        assert isinstance(connection, _Connection)
        self._places.free(connection.task)
        try:
            yield
        finally:
            if not connection.task.done():
                self._take(payer(None, None, peer_of(request.remote or "")), connection.task)


class _Connection(web.RequestHandler):
    """A connection. What cannot be read as HTTP is answered and logged without any of it. `ended` is its end."""

    __slots__ = ("_limits", "_remarks", "ended", "received", "task")

    def __init__(self, server: web.Server, task: asyncio.Task[None], remarks: Remarks, limits: WebLimits) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.idle_s,
            max_headers=_MOST_HEADERS,
            access_log=None,  # type: ignore[arg-type]
        )
        self._remarks = remarks
        self._limits = limits
        self.received = 0
        self.task = task
        self.ended: asyncio.Future[None] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.received += len(data)
        if self.received > MOST_BYTES:
            self.task.cancel()
        else:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        if not self.ended.done():
            self.ended.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that cannot be read, or whose handler has failed, and closes the connection."""
        if not isinstance(exc, ConnectionError):
            self._remark(exc, f"{request.method[:20]} {request.path[:100]!r}")
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer has been sent")
        text = "the coordinator has failed here: its log says why"
        if status == 400:
            text = (
                f"the request cannot be read as HTTP/1.1 ({type(exc).__name__}); if it carries a token that was read "
                "from a file, see whether the file has Windows line ends (CRLF)"
            )
        answer = error_answer(status, text)
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs that something has failed around a request."""
        self._remark(kw.get("exc_info"), "a request")

    def _remark(self, error: BaseException | None, request: str) -> None:
        """Logs an error, if a line about it is due; not its text, which may have something of the request."""
        kind, where = type(error).__name__, ""
        is_malformed = isinstance(error, (HttpProcessingError, web.RequestPayloadError))
        if error is not None and not is_malformed:
            where = "".join(traceback.format_tb(error.__traceback__))
        count = self._remarks.count((kind, where), asyncio.get_running_loop().time())
        if not count:
            return
        if is_malformed:
            peer = self.peername
            _log.warning(
                "a request of %s cannot be read as HTTP/1.1 (%s): %d of this kind since the last line about them, of "
                "which there is one in %g s at most",
                peer[0] if peer else "a connection that has ended",
                kind,
                count,
                self._limits.remark_s,
            )
        else:
            _log.error("%s has failed (%s):\n%s", request, kind, where)


@web.middleware
async def _close_in_time(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Closes a connection with an answer that says so, before it has sent all that it may."""
    response = await handler(request)
    assert isinstance(request.protocol, _Connection)
    if request.protocol.received > MOST_BYTES // 2:
        response.force_close()
    return response


def _context(keeper: CertificateKeeper) -> ssl.SSLContext:
    """Makes the TLS settings. New certificates are in force from the next handshake on."""
    latest = keeper.held
    context = latest.context()

    def choose(connection: ssl.SSLObject, name: str | None, used: ssl.SSLContext) -> None:
        nonlocal latest, context
        if keeper.held is not latest:
            latest = keeper.held
            context = latest.context()
        if used is not context:
            connection.context = context

    context.sni_callback = choose
    return context
