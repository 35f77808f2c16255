"""An HTTP server of a coordinator, with limits that the test chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline_server import Coordinator
from paceline_server.web.server import HttpServer
from paceline_server.web.web_limits import WebLimits


@asynccontextmanager
async def web_server(coordinator: Coordinator, limits: WebLimits) -> AsyncIterator[tuple[HttpServer, str]]:
    """The server and its URL. The coordinator has started, and serves HTTP at another port or not at all."""
    tokens, certificates = coordinator._tokens, coordinator._certificates
    server = HttpServer("127.0.0.1:0", coordinator._dispatcher, tokens, certificates, names=None, limits=limits)
    try:
        yield server, await server.start()
    finally:
        await server.stop()
