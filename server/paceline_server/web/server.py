"""The HTTP server: listens on the coordinator's loop, beside its gRPC server, with the same certificates."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from paceline_server.dispatcher import Dispatcher
from paceline_server.listening import check_free, targets_of
from paceline_server.security.tls import CertificateKeeper
from paceline_server.security.token_file import TokenKeeper
from paceline_server.web.routes import Routes

__all__ = ["HttpServer"]

MOST_CONNECTIONS = 256
"""The most connections at one time; further ones are closed at once, before a handshake. Each may hold one incomplete
request."""

HANDSHAKE_S = 5.0
"""Seconds for a TLS handshake."""

_IDLE_S = 15.0
"""Seconds for which a connection may stay open between two requests."""

_STOP_S = 0.5
"""Seconds for answers in progress when the coordinator stops."""


class HttpServer:
    """A server of the page, metrics and jobs.

    Args:
        address: where to listen, "host:port"; port 0 takes a free port.
        dispatcher: the jobs.
        tokens: the tokens in force; None if callers need none.
        certificates: the coordinator's; None to serve without TLS.
        names: see `Routes`.
    """

    def __init__(
        self,
        address: str,
        dispatcher: Dispatcher,
        tokens: TokenKeeper | None,
        certificates: CertificateKeeper | None,
        *,
        names: frozenset[str] | None,
    ) -> None:
        self._address = address
        self._certificates = certificates
        self._routes = Routes(dispatcher, tokens, names=names)
        self._runner = web.AppRunner(
            self._routes.application(),
            handle_signals=False,
            access_log=None,
            keepalive_timeout=_IDLE_S,
            shutdown_timeout=_STOP_S,
        )
        self._servers: list[asyncio.Server] = []
        self._context: ssl.SSLContext | None = None
        self._greeting: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listens.

        Returns:
            The URL of the page.

        Raises:
            PortInUse: another process listens there already.
            OSError: listening failed for another reason.
        """
        host, _, port = self._address.rpartition(":")
        bound = int(port)
        targets = await targets_of(self._address, host.strip("[]"), bound)
        check_free(self._address, targets)
        await self._runner.setup()
        self._context = None if self._certificates is None else _context(self._certificates)
        loop = asyncio.get_running_loop()
        for family, target in dict.fromkeys(targets):
            server = await loop.create_server(lambda: _Gate(self._connected), target[0], bound, family=family)
            self._servers.append(server)
            bound = server.sockets[0].getsockname()[1]
        return f"{'http' if self._context is None else 'https'}://{host}:{bound}/"

    async def stop(self) -> None:
        """Ends all streams, lets answers in progress end, and closes all connections."""
        self._routes.broadcasts.close()
        for server in self._servers:
            server.close()
        for task in self._greeting:
            task.cancel()
        await self._runner.cleanup()

    def _connected(self, accepted: asyncio.BaseTransport) -> None:
        """Serves a connection, if there is room."""
        server = self._runner.server
        if server is not None and len(server.connections) + len(self._greeting) < MOST_CONNECTIONS:
            # asyncio tells nobody that a handshake has failed, so the connection becomes a socket again.
            task = asyncio.create_task(self._greet(server, accepted.get_extra_info("socket").dup()))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)
        accepted.close()

    async def _greet(self, server: web.Server, connection: socket.socket) -> None:
        patience = None if self._context is None else HANDSHAKE_S
        with suppress(OSError):  # the handshake has failed, or took too long
            await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=self._context, ssl_handshake_timeout=patience
            )


class _Gate(asyncio.Protocol):
    """Passes a connection on before anything is read from it."""

    def __init__(self, passes: Callable[[asyncio.BaseTransport], None]) -> None:
        self._passes = passes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._passes(transport)


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
