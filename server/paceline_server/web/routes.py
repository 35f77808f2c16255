"""The paths of the HTTP server: who may ask, and what is answered.

Callers show the same tokens as those of gRPC (`Authorization: Bearer`), and need the same roles. Only the page's files
and the probes are open to all, because they say nothing about jobs. Any page in a browser may make it send requests. So
orders must be JSON from this very origin. And while neither a token nor a certificate is needed, `Host` must be no
foreign name, since a foreign page can have its own name resolve to this machine (DNS rebinding).

All requests but probes wait for their payer's turn, as calls do (`services.calls`). A request whose turn is more than
`patience_s` away is refused then, and not at once: so one connection makes few requests a second, whatever it does.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import math
import mimetypes
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import (
    BadRequest,
    Draining,
    LimitMet,
    NoRoom,
    NotFound,
    NotLeader,
    PermissionDenied,
    Refused,
    Unauthenticated,
)
from paceline_server.history import history_as_dict
from paceline_server.keeper import Keeper
from paceline_server.limits import Pacers, payer, peer_of
from paceline_server.process_limits import usable_bytes
from paceline_server.security.tls import CertificateKeeper
from paceline_server.security.token_file import TokenKeeper
from paceline_server.security.tokens import Grant, Role
from paceline_server.services.admin import AT_ONCE, AdminHandlers
from paceline_server.services.audit import Action, Audit, Caller
from paceline_server.services.authenticate import seen_by
from paceline_server.web.asking import Asking
from paceline_server.web.coordinator_metrics import CoordinatorCollector
from paceline_server.web.metrics import JobCollector
from paceline_server.web.stream import Broadcasts
from paceline_server.web.web_limits import USUAL, WebLimits
from pacelinepb import __version__
from pacelinepb.status_json import detail_as_dict, event_as_dict, job_as_dict, members_as_dicts
from pacelinepb.v1 import admin_pb2 as pb

_log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

MAX_BODY_BYTES = 64 << 10

_MOST_PAYERS = 20_000
"""The most payers whose pace is remembered: each takes 0.3 KB."""

_PROBES = frozenset(("/healthz", "/readyz"))

_STATUS: dict[type[Refused], int] = {
    Unauthenticated: 401,
    PermissionDenied: 403,
    NotFound: 404,
    Draining: 503,
    NotLeader: 503,
    NoRoom: 503,
    LimitMet: 429,
}

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
"""The Content-Security-Policy. What the page shows comes from workers: no script or style in it may run, whatever a
host is called. Nor may the page's own scripts make elements of text (docs/decisions/25)."""

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_METRICS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the page."""

    data: bytes
    content_type: str
    tag: str


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes:
    """Handlers of all paths.

    `tokens` is None if callers need none, and `certificates` without TLS. `names` are those, in lower case, by which a
    request may call this server, besides IP addresses; None for any. `streaming` is entered for as long as a request is
    answered with a stream.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokens: TokenKeeper | None,
        certificates: CertificateKeeper | None,
        *,
        names: frozenset[str] | None,
        streaming: Callable[[web.Request], AbstractContextManager[None]],
        limits: WebLimits = USUAL,
    ) -> None:
        self.broadcasts = Broadcasts(limits)
        self._limits = limits
        self._dispatcher = dispatcher
        self._admin = AdminHandlers(dispatcher)
        self._tokens = tokens
        self._audit = Audit(tokens)
        self._of_coordinator = CoordinatorCollector(dispatcher, certificates, __version__, time.time(), usable_bytes())
        self._names = names
        self._streaming = streaming
        self._pacers = Pacers(limits.request_rate, limits.request_burst, _MOST_PAYERS)
        self._readiness = _Readiness(dispatcher.keeper, limits)
        dispatcher.vitals.places["streams"] = self.broadcasts.shares
        self._files = _read_files(STATIC)
        self._building = asyncio.Lock()
        self._asking = 0
        self._built: dict[Hashable, tuple[float, bytes]] = {}
        self._pause = 0.0  # seconds
        self._questions = Asking(
            dispatcher, self._admin, self._audit, self._caller, self._payer, self._operated, limits
        )

    def application(self) -> web.Application:
        """Makes the application."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{path:.+}", self._page)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/api/session", self._session)
        app.router.add_get("/api/jobs", self._jobs)
        app.router.add_get("/api/stream", self._stream)
        app.router.add_get("/api/jobs/{name}", self._job)  # a slash in a name comes as %2F
        app.router.add_get("/api/jobs/{name}/events", self._events)
        app.router.add_get("/api/jobs/{name}/history", self._history)
        app.router.add_post("/api/jobs/{name}/drain", self._drain)
        self._questions.add_to(app)
        return app

    # Around all handlers ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Checks where a request comes from, and makes an answer of each refusal."""
        try:
            if request.path not in _PROBES:
                await self._turn(request)
            self._check_host(request)
            if self._dispatcher.standby is not None and request.path.startswith(
                ("/api/jobs", "/api/stream", "/readyz")
            ):
                raise self._dispatcher.standby()
            response = await handler(request)
        except Refused as refused:
            if request.path not in _PROBES:  # a standby refuses each of them
                self._dispatcher.vitals.refused(refused)
            response = error_answer(_STATUS.get(type(refused), 400), str(refused))
            if isinstance(refused, Unauthenticated):
                response.headers["WWW-Authenticate"] = "Bearer"
            if isinstance(refused, LimitMet):
                response.headers["Retry-After"] = str(math.ceil(self._limits.patience_s))
        except web.HTTPException as error:
            response = error_answer(error.status, f"{request.method} {request.path}: {error.reason}"[:300])
        if request.path in _PROBES:
            response.force_close()  # so each takes a connection, and a flood of them waits to be accepted
        if not response.prepared:
            response.headers.update(_HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    async def _turn(self, request: web.Request) -> None:
        """Waits if the payer makes requests faster than it may; refuses what would wait for too long."""
        who, patience = self._payer(request), self._limits.patience_s
        delay = self._pacers.delay(who, asyncio.get_running_loop().time(), patience)
        if delay:
            await asyncio.sleep(min(delay, patience))
        if delay > patience:
            raise LimitMet(f"{who} makes more than {self._limits.request_rate} requests a second")

    def _payer(self, request: web.Request) -> str:
        tokens = None if self._tokens is None else self._tokens.last
        return payer(tokens, request.headers.get("Authorization"), peer_of(request.remote or ""))

    def _check_host(self, request: web.Request) -> None:
        if self._names is None:
            return
        host = request.headers.get("Host", "").rpartition("@")[2]
        name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower() in self._names:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise PermissionDenied(
                "this coordinator asks for no token, so it answers only to IP addresses, localhost and its host's own "
                f"name, not to {name[:100]!r}"
            ) from None

    async def _grant(self, request: web.Request, role: Role = Role.READ) -> Grant:
        """Returns what the caller may do."""
        if self._tokens is None:
            return Grant()
        try:
            grant = (await self._tokens.current()).grant(request.headers.get("Authorization"))
        except Unauthenticated:
            shown = "Authorization" in request.headers
            text = "it does not know the one that was sent" if shown else "send Authorization: Bearer TOKEN"
            raise Unauthenticated(f"this coordinator asks for a token: {text}") from None
        grant.check_role(role)
        return grant

    async def _named(self, request: web.Request, role: Role = Role.READ) -> str:
        """Returns the job of the path, if the caller may ask about it."""
        name = request.match_info["name"]
        (await self._grant(request, role)).check(name)
        return name

    async def _operated(self, request: web.Request) -> str:
        """Returns the job of the path, if the caller may operate it."""
        return await self._named(request, Role.OPERATOR)

    async def _caller(self, request: web.Request) -> Caller:
        """Says for the audit log who makes a request."""
        return await self._audit.caller(_address(request), _common_name(request), request.headers.get("Authorization"))

    async def _shared(self, key: Hashable, build: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns an answer whose building has begun since the call. One is built at a time, for all who wait for it.

        To build one takes the coordinator's loop long: 40 ms for the metrics of 100 jobs. So others have it for as long
        before the next one is built.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        self._asking += 1
        try:
            async with self._building:
                began, answer = self._built.get(key, (asked, b""))
                if began <= asked:
                    await asyncio.sleep(self._pause)
                    began = loop.time()
                    answer = await build()
                    self._pause = loop.time() - began
                    self._built[key] = began, answer
                return answer
        finally:
            self._asking -= 1
            if not self._asking:
                self._built.clear()
                self._pause = 0.0

    # Probes and metrics -----------------------------------------------------------------------------------------------

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        """Answers 200 if jobs can be served: this coordinator does not stop, and its storage answers."""
        if self._dispatcher.draining:
            raise Draining("the coordinator is stopping")
        if trouble := await self._readiness.trouble():
            return error_answer(503, trouble)
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        grant = await self._grant(request)

        async def build() -> bytes:
            now, written = asyncio.get_running_loop().time(), []
            jobs = JobCollector(self._dispatcher, now, grant.allows)
            for metric in chain(self._of_coordinator.collect(), jobs.collect()):
                written.append(generate_latest(_One(metric)))
                await asyncio.sleep(0)  # others have a turn
            return b"".join(written)

        body = await self._shared(("metrics", grant.jobs), build)
        return web.Response(body=body, headers={"Content-Type": _METRICS})

    # The page ---------------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        file = self._files.get(request.match_info.get("path", "index.html"))
        if file is None:
            raise NotFound(f"there is no {request.path[:200]}")
        headers = {"ETag": file.tag, "Cache-Control": "no-cache", "Content-Type": file.content_type}
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.data, headers=headers)

    # What the page asks for -------------------------------------------------------------------------------------------

    async def _session(self, request: web.Request) -> web.Response:
        """Tells a caller whether it needs a token and what it may do; an unknown token counts as none."""
        may_drain = True
        try:
            await self._grant(request, Role.OPERATOR)
        except (Unauthenticated, PermissionDenied):
            may_drain = False
        facts = {"needs_token": self._tokens is not None, "may_drain": may_drain, "version": __version__}
        return _json(_dump(facts))

    async def _jobs(self, request: web.Request) -> web.Response:
        grant = await self._grant(request)

        async def build() -> bytes:
            return _dump(await self._list(grant))

        return _json(await self._shared(("jobs", grant.jobs), build))

    async def _list(self, grant: Grant) -> dict[str, Any]:
        jobs = (await self._admin.ListJobs(pb.ListJobsRequest())).jobs
        return {"jobs": [job_as_dict(job) for job in jobs if grant.allows(job.name)]}

    async def _job(self, request: web.Request) -> web.Response:
        grant, name = await self._grant(request), request.match_info["name"]
        grant.check(name)

        async def build() -> bytes:
            return _dump(await self._detail(name, grant.role))

        return _json(await self._shared(("job", name, grant.role), build))

    async def _detail(self, name: str, role: Role) -> dict[str, Any]:
        """Returns a job as callers with a role see it."""
        detail = await self._admin.GetJob(pb.GetJobRequest(job=name))
        members: list[dict[str, Any]] = []
        for member in members_as_dicts(detail):
            if members and len(members) % AT_ONCE == 0:
                await asyncio.sleep(0)  # others have a turn
            members.append(member)
        now, observatory = self._now(), self._dispatcher.observatory
        tally = observatory.tally(now, name)
        started = None if tally is None or tally.started is None else observatory.wall_clock(tally.started)
        at = observatory.wall_clock(now)
        return {"at": at, "started": started, **detail_as_dict(seen_by(role, detail), members)}

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _history(self, request: web.Request) -> web.Response:
        name, observatory = await self._named(request), self._dispatcher.observatory

        async def build() -> bytes:
            tally = observatory.tally(self._now(), name)
            if tally is None:
                raise NotFound(f"nothing is known of the course of a job {name!r}")
            return _dump(history_as_dict(tally.history, observatory.wall_clock))

        return _json(await self._shared(("history", name), build))

    async def _events(self, request: web.Request) -> web.Response:
        name = await self._named(request)
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) < 19):
            raise BadRequest(f"after must be a whole number, not {after[:50]!r}")

        async def build() -> bytes:
            found = await self._admin.ListEvents(pb.ListEventsRequest(job=name, after=int(after)))
            return _dump({"events": [event_as_dict(each) for each in found.events], "next": found.next})

        return _json(await self._shared(("events", name, int(after)), build))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        grant, name = await self._grant(request), request.query.get("job", "")
        if name:
            grant.check(name)

        async def check() -> None:
            now = await self._grant(request)
            if (name and not now.allows(name)) or (not name and now.jobs != grant.jobs):
                raise PermissionDenied("the token is good for other jobs now")
            if now.role is not grant.role:
                raise PermissionDenied("the token has another role now")

        with self.broadcasts.share(self._payer(request)), self._streaming(request):
            if name:
                key, build = ("job", name, grant.role), lambda: self._detail(name, grant.role)
                return await self.broadcasts.serve(request, key, "job", build, check)
            return await self.broadcasts.serve(request, ("jobs", grant.jobs), "jobs", lambda: self._list(grant), check)

    async def _drain(self, request: web.Request) -> web.Response:
        """Has members leave, if the request comes from an operator, and not from another page in a browser."""
        with self._audit.of("DrainMembers", await self._caller(request)) as action:
            action.job = request.match_info["name"]
            return await self._drain_audited(request, action)

    async def _drain_audited(self, request: web.Request, action: Action) -> web.Response:
        if request.content_type != "application/json":
            raise BadRequest("an order must have Content-Type: application/json")
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:  # a proxy may have ended TLS
            raise PermissionDenied(f"an order cannot come from the page of {origin[:200]!r}")
        name = await self._operated(request)
        if self._dispatcher.draining:
            raise Draining("the coordinator is stopping")
        try:
            asked = json.loads(await request.read())
        except (ValueError, RecursionError):
            raise BadRequest("the body is no JSON") from None
        members = asked.get("members") if isinstance(asked, dict) else None
        if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
            raise BadRequest('the body must be {"members": ["3", ...]}: ranks or member ids, none for all')
        action.members = members
        told = await self._admin.DrainMembers(pb.DrainMembersRequest(job=name, members=members))
        return _json(_dump({"member_ids": list(told.member_ids)}))


def _address(request: web.Request) -> str:
    """Returns the caller's IP address and port."""
    host, port, *_ = request.get_extra_info("peername") or ("", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _common_name(request: web.Request) -> str | None:
    held = request.get_extra_info("peercert") or {}
    return next((value for part in held.get("subject", ()) for name, value in part if name == "commonName"), None)


def _dump(value: object) -> bytes:
    return json.dumps(value).encode()


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def error_answer(status: int, text: str) -> web.Response:
    """Returns the answer to a request that is refused."""
    body = json.dumps({"error": text})
    return web.Response(status=status, text=body, content_type="application/json", headers=_HEADERS)


def _read_files(folder: Path) -> dict[str, _File]:
    """Reads all files of the page at the start: a request names one of these, and no path on the disk."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            text = "; charset=utf-8" if kind.startswith("text/") or kind.endswith(("javascript", "svg+xml")) else ""
            tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
            found[path.relative_to(folder).as_posix()] = _File(data, kind + text, tag)
    return found


class _One(Collector):
    """One metric, to be written by itself."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


class _Readiness:
    """Whether the storage answers. It is asked at most once in `ready_for_s`, for all who want to know meanwhile.

    With etcd, to ask is to write. A storage that hangs is not asked again before it has answered.
    """

    def __init__(self, keeper: Keeper, limits: WebLimits) -> None:
        self._keeper = keeper
        self._limits = limits
        self._asked: asyncio.Future[None] | None = None
        self._look: asyncio.Task[str] | None = None
        self._holds_until = -math.inf

    async def trouble(self) -> str:
        """Returns why the storage cannot be used, empty if it can."""
        if self._look is None or (self._look.done() and asyncio.get_running_loop().time() >= self._holds_until):
            self._look = asyncio.create_task(self._ask())
        return await asyncio.shield(self._look)

    async def _ask(self) -> str:
        if self._asked is None or self._asked.done():
            self._asked = self._keeper.check()
            self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # nobody may wait then
        await asyncio.wait({self._asked}, timeout=self._limits.ready_s)
        self._holds_until = asyncio.get_running_loop().time() + self._limits.ready_for_s
        if not self._asked.done():
            return f"the storage has not answered for {self._limits.ready_s:g} s"
        error = self._asked.exception()
        return "" if error is None else str(error) or type(error).__name__
