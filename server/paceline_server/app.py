"""Connects storage, jobs, services, health and reflection to a gRPC server; together they are the coordinator.

`Coordinator` runs on the event loop that starts it and installs no signal handlers, so that a worker or a launcher can
embed it. `serving.serve` runs one in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline_server._grpc import aio
from paceline_server.dispatcher import Dispatcher, Observer
from paceline_server.errors import NotLeader
from paceline_server.limits import Budget, payer
from paceline_server.listening import listen
from paceline_server.security.tls import CertificateKeeper, TlsPaths
from paceline_server.security.token_file import TokenKeeper
from paceline_server.security.tokens import Tokens, exposure
from paceline_server.services.admin import AdminHandlers, AdminLimits
from paceline_server.services.audit import Audit, AuditInterceptor
from paceline_server.services.authenticate import AuthenticationInterceptor
from paceline_server.services.calls import OpenCalls, PacingInterceptor
from paceline_server.services.confirming import ConfirmingInterceptor
from paceline_server.services.probes import Probes
from paceline_server.services.refusals import RefusalInterceptor
from paceline_server.services.session import SessionHandlers
from paceline_server.services.standby import StandbyHandlers
from paceline_server.services.store import StoreHandlers
from paceline_server.settings import ServerSettings, check_http
from paceline_server.storage.base import Storage
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.sqlite import SqliteStorage
from pacelinepb.memory_guard import Callers, MemoryGuard
from pacelinepb.pieces import MESSAGE_BYTES
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from pacelinepb.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server

if TYPE_CHECKING:
    from paceline_server.web.server import HttpServer

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

    `storage` replaces the one that `settings` name, for tests, which also pass their own `probes`, and
    `admin_limits` for the service over gRPC. `failover` sets `epoch` and `standby`, see `Dispatcher`. `http_url` is the
    URL of the page once it is served; empty without `settings.http`.
    """

    def __init__(
        self,
        settings: ServerSettings | None = None,
        *,
        storage: Storage | None = None,
        observer: Observer | None = None,
        epoch: int = 0,
        standby: Callable[[], NotLeader] | None = None,
        probes: Probes | None = None,
        admin_limits: AdminLimits | None = None,
    ) -> None:
        self._settings = settings or ServerSettings()
        path = self._settings.state_path
        self._storage: Storage = storage or (SqliteStorage(path) if path is not None else MemoryStorage())
        self._standby = standby
        self._probes = probes or Probes()
        self._admin_limits = admin_limits or AdminLimits()
        self._dispatcher = Dispatcher(self._settings, self._storage, observer, epoch=epoch, standby=standby)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs lack it
        self._server: aio.Server | None = None
        self._starting: asyncio.Future[None] | None = None
        self._began = self._stopped = False
        self._tokens: TokenKeeper | None = None
        self._certificates: CertificateKeeper | None = None
        self._http: HttpServer | None = None
        self._callers = Callers(_IDLE_MS / 1_000)
        self._guard: MemoryGuard | None = None
        self.http_url = ""

    async def start(self) -> str:
        """Loads the stored state and serves; returns the address that the coordinator listens at, host:port.

        Raises:
            PortInUse: another process listens there already.
            StateUnusable: the state file cannot be used.
            NotLeader: another of the coordinators that share a state leads.
            TlsUnusable, TokensUnusable: the files that the settings name cannot be used.
            HttpUnusable: aiohttp or prometheus_client is not installed, and the settings ask for HTTP.
            OSError: listening failed for another reason.
        """
        if self._settings.http is not None:
            check_http()
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
        vitals = self._dispatcher.vitals
        vitals.memory["calls"] = memory = Budget(self._settings.call_bytes)
        calls = OpenCalls(memory, self._settings.longest_request)
        interceptors: list[aio.ServerInterceptor] = [  # type: ignore[type-arg]
            PacingInterceptor(self._settings, calls, self._payer_of, vitals, self._callers, self._probes),
            RefusalInterceptor(vitals),
            AuditInterceptor(Audit(self._tokens)),
        ]
        if self._dispatcher.epoch:
            interceptors.append(ConfirmingInterceptor(self._storage))
        if self._tokens is not None:
            interceptors.append(AuthenticationInterceptor(self._tokens, vitals))
        self._server = server = aio.server(interceptors=interceptors, options=self._options())
        if self._standby is not None:
            StandbyHandlers(self._standby).add_to(server)
        else:
            SessionHandlers(self._dispatcher).add_to(server)
            StoreHandlers(self._dispatcher).add_to(server)
            add_AdminServiceServicer_to_server(AdminHandlers(self._dispatcher, self._admin_limits), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        host, _, _ = self._settings.listen.rpartition(":")
        listening = await listen(server, self._settings.listen, credentials)
        self._dispatcher.listens_at(listening)
        if self._settings.http is not None:
            importlib.import_module("paceline_server.web.server")  # takes long: before the dispatcher watches the loop
        await self._dispatcher.start()
        if self._settings.http is not None:
            await self._serve_http(self._settings.http)
        self._starting = asyncio.ensure_future(server.start())
        await asyncio.shield(self._starting)
        if self._tokens is not None and self._settings.tls_ca is None:  # else there are no strangers
            self._guard = MemoryGuard(self._callers, {port for _, port in listening})
        status = health_pb2.HealthCheckResponse.SERVING
        if self._standby is not None:  # the process is well, and health without a name of a service says so
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in _SERVICES:
            await self._health.set(name, status)
        address = f"{host}:{listening[0][1]}"
        _log.info("listening on %s", address)
        if (warning := exposure(self._settings)) is not None:
            _log.warning("%s", warning)
        return address

    async def _serve_http(self, address: str) -> None:
        from paceline_server.web.server import HttpServer  # the extra `http` is there: `start` has checked

        # A foreign page can make its own name resolve to us (DNS rebinding), but it has no token and no certificate.
        authenticates = self._tokens is not None or self._settings.tls_ca is not None
        host = address.rpartition(":")[0].strip("[]")
        names = None if authenticates else frozenset({"localhost", socket.gethostname().lower(), host.lower()} - {""})
        self._http = HttpServer(address, self._dispatcher, self._tokens, self._certificates, names=names)
        self.http_url = await self._http.start()
        self._dispatcher.listens_at(self._http.listening)
        _log.info("the page is at %s", self.http_url)

    async def stop(self, grace: float = 1.0, *, for_good: bool = False) -> None:
        """Drains and stops: reports not serving, wakes waiters with DRAINING, ends calls, closes the state.

        Calls in progress have `grace` seconds to end. With `for_good` no coordinator will take this one's place: it
        ends its sessions in good order, members do not look for it, and they hear of this within `grace`, too.
        """
        if self._stopped or not self._began:
            return
        self._stopped = True
        if for_good:
            loop = asyncio.get_running_loop()
            cut = loop.time() + grace
            await self._dispatcher.dissolve(grace)
            grace = max(0.0, cut - loop.time())
        self.drain()
        # A watcher that does not read holds the lock of the health service; it must not hold us up.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEALTH_S):
                await self._health.enter_graceful_shutdown()
        if self._starting is not None:  # grpc crashes if a server is stopped while it starts
            await asyncio.wait({self._starting})
        if self._http is not None:
            await self._http.stop()
        server, self._server = self._server, None
        if server is not None:
            if self._starting is None:  # grpc closes the port only of a server that was started
                await server.start()
            await server.stop(grace)
        if self._guard is not None:
            self._guard.close()
        if self._tokens is not None:
            await self._tokens.close()
        if self._certificates is not None:
            self._certificates.close()
        await self._storage.close()
        _log.info("stopped")

    def drain(self) -> None:
        """Ends all sessions and waiting calls at once, and decides nothing more; `stop` does so, too."""
        self._dispatcher.drain()

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
