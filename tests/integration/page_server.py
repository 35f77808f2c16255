"""A server of the page whose jobs a test makes up: for states that a real job rarely is in, and for 1,000 workers.

It serves the real files of the page, and JSON made by the same functions as the coordinator's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from google.protobuf.duration_pb2 import Duration

import paceline_server
from paceline_server.web.routes import POLICY
from pacelinepb.status_json import detail_as_dict
from pacelinepb.v1 import admin_pb2 as pb
from pacelinepb.v1 import session_pb2

__all__ = ["HeldAnswer", "PageServer", "add_event", "add_gone", "add_member", "new_job", "new_process", "page_server"]

_STATIC = Path(str(paceline_server.__file__)).parent / "web" / "static"


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))


def new_job(
    name: str = "digits", workers: int = 4, *, stalled: float | None = None, **summary: Any
) -> pb.GetJobResponse:
    """A job that trains with so many workers; if it has been stalled for some seconds, `stall` says why."""
    facts: dict[str, Any] = {
        "phase": pb.JOB_PHASE_RUNNING,
        "generation": 1,
        "world_size": workers,
        "reason": f"training with all {workers} workers",
        "min_workers": workers,
        "max_workers": workers,
        "totals": pb.JobTotals(committed=40, samples=10240, generations=1, step=40, steps_per_second=20, goodput=0.97),
    }
    detail = pb.GetJobResponse(summary=pb.JobSummary(name=name, **facts | summary))
    if stalled is not None:
        detail.summary.stalled.CopyFrom(_duration(stalled))
    detail.settings.min_workers = detail.settings.max_workers = workers
    for rank in range(workers):
        add_member(detail, rank)
    return detail


def add_member(detail: pb.GetJobResponse, rank: int | None, **fields: Any) -> pb.MemberStatus:
    """Adds a member, which trains unless told otherwise; one without a rank waits."""
    number = len(detail.members) + 1
    status = detail.members.add(in_view=rank is not None, attached=True, silent=_duration(0.1))
    status.member.member_id = fields.pop("member_id", f"m{number}")
    status.member.rank = rank or 0
    status.member.process.host = fields.pop("host", f"host-{'abcdefgh'[number % 8]}")
    status.member.process.pid = fields.pop("pid", 4700 + number)
    status.standing = fields.pop("standing", "training" if rank is not None else "ready to join")
    status.attached = fields.pop("attached", True)
    status.silent.CopyFrom(_duration(fields.pop("silent_s", 0.1)))
    fields.setdefault("step", 40 if rank is not None else 0)
    if rank is not None:
        fields = {"speed": 850.5, "share": 0.25} | fields
    progress = session_pb2.Heartbeat(operation=200, sent_bytes={"shm": 1 << 20, "tcp": 1 << 18}, **fields)
    status.progress.CopyFrom(progress)
    return status


def add_gone(detail: pb.GetJobResponse, rank: int, how: str, ago: float = 2.0, output: str = "") -> None:
    """Adds a member that has ended."""
    gone = detail.gone.add(how=how, in_view=True, ago=_duration(ago), output=output)
    gone.member.member_id = f"gone-{rank}-{len(detail.gone)}"
    gone.member.rank = rank
    gone.member.process.host = "host-b"
    gone.member.process.pid = 4711


def add_event(detail: pb.GetJobResponse, kind: str, text: str, generation: int = 1, at: float = 1.8e9) -> None:
    """Adds an event; numbers grow by 1."""
    number = detail.events[-1].number + 1 if detail.events else 1
    made = detail.events.add(number=number, kind=kind, text=text, generation=generation, job=detail.summary.name)
    made.at.FromNanoseconds(round(at * 1e9))


def new_process(rank: int, frames: list[str], trouble: str = "") -> dict[str, Any]:
    """The stacks of a process: a main thread that is at some places."""
    threads = [] if trouble else [{"main": True, "library": False, "frames": frames}]
    whose = {"rank": rank, "member_id": f"m{rank + 1}", "host": f"host-{'bcdefgha'[rank % 8]}", "pid": 4701 + rank}
    return whose | {"threads": threads, "trouble": trouble}


class HeldAnswer:
    """An answer that is made at once, and sent when the test lets it go."""

    def __init__(self) -> None:
        self.made, self.may_go = asyncio.Event(), asyncio.Event()


class PageServer:
    """A server under the control of a test.

    Attributes:
        url: where it is.
        jobs: what it shows. After a change: `push`.
        token: the operator's token; empty if none is needed.
        drained: what was asked to leave, as the page named it.
        refuses: True while it answers no stream.
        refusals: counts the streams that it has not answered.
        history: what it answers to a question for a job's history.
        answers: what it answers to operators, by what they ask for: "output", "stacks", "trace".
        asked: what operators asked for, and with which query.
        at: the coordinator's clock in the next message; `push` moves it on by half a second.
        started: when the jobs began; None if that is not known.
        silent: words that an address has if it gets no answer at all, as if the network had swallowed it.
        swallowed: set once there was such a request.
        may_drain: False if its callers may look only.
        held: answers that wait, by the number after which a caller asks for events.
    """

    def __init__(self) -> None:
        self.url = ""
        self.jobs: list[pb.GetJobResponse] = []
        self.token = ""
        self.drained: list[list[str]] = []
        self.refuses = False
        self.refusals = asyncio.Semaphore(0)
        self.history: dict[str, Any] = {
            "at": [],
            "step": [],
            "operations": [],
            "goodput": [],
            "sent_bytes": {},
            "logged": {},
        }
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.at = 1.8e9
        self.started: float | None = None
        self.silent = ""
        self.swallowed = asyncio.Event()
        self.may_drain = True
        self.held: dict[int, HeldAnswer] = {}
        self._streams: dict[asyncio.Queue[bytes | None], str | None] = {}

    def push(self, message: dict[str, Any] | None = None) -> None:
        """Sends every viewer what the jobs are now, or one message to the viewers of jobs."""
        self.at += 0.5
        for stream, name in self._streams.items():
            stream.put_nowait(_as_event(self.message(name) if message is None else message))

    def cut(self) -> None:
        """Ends all streams."""
        for stream in self._streams:
            stream.put_nowait(None)

    def end(self, why: str) -> None:
        """Ends all streams, and says why, as the coordinator does when a job has gone."""
        for stream in self._streams:
            stream.put_nowait(f"event: end\ndata: {json.dumps({'error': why})}\n\n".encode())
        self.cut()

    def application(self) -> web.Application:
        """Makes the application."""
        made = web.Application(middlewares=[self._guard])
        made.router.add_get("/", self._index)
        made.router.add_get("/api/session", self._session)
        made.router.add_get("/api/stream", self._stream)
        made.router.add_get("/api/jobs/{name}/events", self._events)
        made.router.add_post("/api/jobs/{name}/drain", self._drain)
        made.router.add_get("/api/jobs/{name}/history", self._history)
        made.router.add_get("/api/jobs/{name}/{what:output|stacks|trace}", self._answer)
        made.router.add_static("/static/", _STATIC)
        return made

    def message(self, name: str | None) -> dict[str, Any]:
        """Returns what the viewers of a job are sent, or those of all jobs."""
        details = [detail_as_dict(job) for job in self.jobs if name in (None, job.summary.name)]
        if name is None:
            return {"jobs": [detail["job"] for detail in details]}
        return details[0] | {"events": details[0]["events"][-20:], "at": self.at, "started": self.started}

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.silent and self.silent in request.path_qs:
            self.swallowed.set()
            await asyncio.Event().wait()
        asks = request.path.startswith("/api/") and request.path != "/api/session"
        if asks and self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "the token is not valid"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(_STATIC / "index.html", headers={"Content-Security-Policy": POLICY})

    async def _session(self, request: web.Request) -> web.Response:
        may = self.may_drain and (not self.token or request.headers.get("Authorization") == f"Bearer {self.token}")
        return web.json_response({"needs_token": bool(self.token), "may_drain": may, "version": "1.2.3"})

    async def _events(self, request: web.Request) -> web.Response:
        after = int(request.query["after"])
        (job,) = (detail_as_dict(job) for job in self.jobs if job.summary.name == request.match_info["name"])
        found = [event for event in job["events"] if event["number"] > after][:1000]
        if after in self.held:
            self.held[after].made.set()
            await self.held[after].may_go.wait()
        return web.json_response({"events": found, "next": found[-1]["number"] if found else after})

    async def _history(self, request: web.Request) -> web.Response:
        return web.json_response(self.history)

    async def _answer(self, request: web.Request) -> web.Response:
        what = request.match_info["what"]
        self.asked.append(f"{what}?{request.query_string}")
        if what not in self.answers:
            return web.json_response({"error": "the worker has not answered"}, status=504)
        return web.json_response(self.answers[what])

    async def _drain(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        asked = json.loads(await request.text())["members"]
        self.drained.append(asked)
        (job,) = (job for job in self.jobs if job.summary.name == request.match_info["name"])
        return web.json_response({"member_ids": asked or [status.member.member_id for status in job.members]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("job")
        if self.refuses:
            self.refusals.release()
            return web.json_response(
                {"error": "the coordinator is not ready"}, status=503, headers={"Retry-After": "1"}
            )
        if name is not None and all(job.summary.name != name for job in self.jobs):
            return web.json_response({"error": f"there is no job {name!r}"}, status=404)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await answer.prepare(request)
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams[waiting] = name
        try:
            await answer.write(_as_event(self.message(name)))
            while (message := await waiting.get()) is not None:
                await answer.write(message)
        finally:
            del self._streams[waiting]
        return answer


def _as_event(message: dict[str, Any]) -> bytes:
    return f"event: job\ndata: {json.dumps(message)}\n\n".encode()


@asynccontextmanager
async def page_server(*jobs: pb.GetJobResponse) -> AsyncIterator[PageServer]:
    """Serves the page on a free port."""
    server = PageServer()
    server.jobs = list(jobs)
    runner = web.AppRunner(server.application(), shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        server.url = f"http://{host}:{port}/"
        yield server
    finally:
        await runner.cleanup()
