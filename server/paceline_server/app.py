"""Connects storage, jobs, services, health and reflection to a gRPC server; together they are the coordinator.

`Coordinator` runs on the event loop that starts it and installs no signal handlers, so that a worker or a launcher can
embed it. `serve` runs a coordinator in a process of its own until SIGTERM or Ctrl-C, and then drains it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline_server._grpc import aio
from paceline_server.dispatcher import Dispatcher, Observer
from paceline_server.limits import Budget, payer
from paceline_server.listening import listen
from paceline_server.process_limits import raise_file_limit, share_one_heap
from paceline_server.security.tls import CertificateKeeper, TlsPaths
from paceline_server.security.token_file import TokenKeeper
from paceline_server.security.tokens import Tokens, exposure
from paceline_server.services.admin import AdminHandlers
from paceline_server.services.authenticate import AuthenticationInterceptor
from paceline_server.services.calls import OpenCalls, PacingInterceptor
from paceline_server.services.refusals import RefusalInterceptor
from paceline_server.services.session import SessionHandlers
from paceline_server.services.store import StoreHandlers
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import Storage
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.sqlite import SqliteStorage
from pacelinepb.pieces import MESSAGE_BYTES
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from pacelinepb.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server

__all__ = ["Coordinator", "serve"]

_log = logging.getLogger(__name__)

_SERVICES = tuple(
    descriptor.services_by_name[name].full_name
    for descriptor, name in (
        (session_pb2.DESCRIPTOR, "SessionService"),
        (store_pb2.DESCRIPTOR, "StoreService"),
        (admin_pb2.DESCRIPTOR, "AdminService"),
    )
)


_IDLE_MS = 1_000
"""Milliseconds for which a connection may stay open without a call. Of 1,000 workers that connect at once, some make
their first call only after a quarter of a second; and a worker that reconnects after a cut should not wait for long."""

_UNREAD_BYTES = 16 << 10

_HEALTH_S = 0.2
"""Seconds for the watchers of our health to hear that we stop."""


class Coordinator:
    """A coordinator that can be started once and stopped once.

    Args:
        settings: where to listen, where to keep state, limits.
        storage: replaces the storage that `settings.state_path` names; for tests.
        observer: called with ("stream_began" or "stream_ended", member id, time on the loop's clock).
    """

    def __init__(
        self,
        settings: ServerSettings | None = None,
        *,
        storage: Storage | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._settings = settings or ServerSettings()
        path = self._settings.state_path
        self._storage: Storage = storage or (SqliteStorage(path) if path is not None else MemoryStorage())
        self._dispatcher = Dispatcher(self._settings, self._storage, observer)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs lack it
        self._server: aio.Server | None = None
        self._starting: asyncio.Future[None] | None = None
        self._began = self._stopped = False
        self._tokens: TokenKeeper | None = None
        self._certificates: CertificateKeeper | None = None

    async def start(self) -> str:
        """Loads the stored state and serves.

        Returns:
            The address that the coordinator listens at, host:port.

        Raises:
            PortInUse: another process listens there already.
            StateUnusable: the state file cannot be used.
            TlsUnusable, TokensUnusable: the files that the settings name cannot be used.
            OSError: listening failed for another reason.
        """
        assert not self._began, "a coordinator starts once"
        self._began = True
        try:
            return await self._start()
        except BaseException:  # a signal may come at any moment of the start
            await self.stop(grace=0)
            raise

    async def _start(self) -> str:
        self._tokens = await _token_keeper(self._settings)
        if (paths := TlsPaths.of(self._settings)) is not None:
            self._certificates = await CertificateKeeper.open(paths)
        credentials = None if self._certificates is None else self._certificates.credentials
        calls = OpenCalls(Budget(self._settings.call_bytes), self._settings.longest_request)
        interceptors: list[aio.ServerInterceptor] = [  # type: ignore[type-arg]
            PacingInterceptor(self._settings, calls, self._payer_of),
            RefusalInterceptor(),
        ]
        if self._tokens is not None:
            interceptors.append(AuthenticationInterceptor(self._tokens))
        self._server = server = aio.server(interceptors=interceptors, options=self._options())
        SessionHandlers(self._dispatcher).add_to(server)
        StoreHandlers(self._dispatcher).add_to(server)
        add_AdminServiceServicer_to_server(AdminHandlers(self._dispatcher), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        host, _, _ = self._settings.listen.rpartition(":")
        port = await listen(server, self._settings.listen, credentials)
        await self._dispatcher.start()
        self._starting = asyncio.ensure_future(server.start())
        await asyncio.shield(self._starting)
        for name in _SERVICES:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        address = f"{host}:{port}"
        _log.info("listening on %s", address)
        if (warning := exposure(self._settings)) is not None:
            _log.warning("%s", warning)
        return address

    async def stop(self, grace: float = 1.0, *, for_good: bool = False) -> None:
        """Drains and stops: reports not serving, wakes waiters with DRAINING, ends calls, closes the state.

        Args:
            grace: seconds for calls in progress to end before they are cut.
            for_good: no coordinator will take this one's place, so it ends its sessions in good order and members do
                not look for it. They hear of this within `grace`, too.
        """
        if self._stopped or not self._began:
            return
        self._stopped = True
        if for_good:
            loop = asyncio.get_running_loop()
            cut = loop.time() + grace
            await self._dispatcher.dissolve(grace)
            grace = max(0.0, cut - loop.time())
        self._dispatcher.drain()
        # A watcher that does not read holds the lock of the health service; it must not hold us up.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEALTH_S):
                await self._health.enter_graceful_shutdown()
        if self._starting is not None:  # grpc crashes if a server is stopped while it starts
            await asyncio.wait({self._starting})
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace)
        if self._tokens is not None:
            await self._tokens.close()
        if self._certificates is not None:
            self._certificates.close()
        await self._storage.close()
        _log.info("stopped")

    async def wait_for_termination(self) -> None:
        """Waits until the server has ended."""
        if self._server is not None:
            await self._server.wait_for_termination()

    def _payer_of(self, authorization: str | None, peer: str) -> str:
        return payer(None if self._tokens is None else self._tokens.last, authorization, peer)

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.so_reuseport", 0),  # otherwise two coordinators would share a port, and each see half of a job
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            # The bytes of a call that grpc takes before we read them. `CALL_BYTES` counts them, so grpc must not choose
            # the number by itself.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
            # A worker may ping us as often as it likes; heartbeats decide who is silent, not pings.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_concurrent_streams", self._settings.max_calls),
            ("grpc.server_handshake_timeout_ms", round(1000 * self._settings.first_message_time)),
            # TCP may take seconds to resend the last messages of an evicted session. Once its connection is closed,
            # the member's next heartbeat is answered with a reset, and the member comes back.
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            # Connections of hosts that vanished without closing them must not stay for ever.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
        ]


async def _token_keeper(settings: ServerSettings) -> TokenKeeper | None:
    """Returns the tokens that the settings name; None if callers need no token."""
    if settings.token is not None:
        return TokenKeeper(Tokens.single(settings.token))
    return None if settings.token_file is None else await TokenKeeper.of_file(settings.token_file)


def serve(settings: ServerSettings, announce: Callable[[str], None] | None = None, grace: float = 1.0) -> None:
    """Serves until SIGTERM or SIGINT; a second signal cuts the drain short. A signal during the start ends the start.

    Args:
        settings: the coordinator's settings.
        announce: called with "host:port" once the coordinator listens.
        grace: seconds for calls in progress to end.

    Raises:
        PortInUse: another process listens at the address already.
        StateUnusable: the state file cannot be used.
        TlsUnusable, TokensUnusable: the files that the settings name cannot be used.
        OSError: listening failed for another reason.
    """
    share_one_heap()
    raise_file_limit()
    asyncio.run(_serve(settings, announce, grace))


async def _serve(settings: ServerSettings, announce: Callable[[str], None] | None, grace: float) -> None:
    coordinator = Coordinator(settings)
    asked = [asyncio.Event(), asyncio.Event()]

    def on_signal() -> None:
        next((event for event in asked if not event.is_set()), asked[-1]).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.create_task(coordinator.start())
    told = asyncio.create_task(asked[0].wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # a file or a resolver may hang
        starting.cancel()
        await asyncio.wait({starting})
        if starting.cancelled():
            return
    address = starting.result()
    if announce is not None:
        announce(address)
    await told
    stopping = asyncio.create_task(coordinator.stop(grace))
    again = asyncio.create_task(asked[1].wait())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if stopping.done():
        stopping.result()
    else:
        stopping.cancel()
