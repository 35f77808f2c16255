"""Questions of the page to members: the last lines that they have printed, their stacks, and a trace of all.

They take an operator's role and have a line in the audit log, as the same questions of commands (`AskMembers`), whose
limits hold. To answer costs members work, so no foreign page may make a browser ask, even if it could not read the
answer. Browsers tell where a request comes from (`Sec-Fetch-Site`) only over TLS and on loopback. So a request also
needs a header that no foreign page can send without being allowed to, which is never granted: the page's own
(`OWN_HEADER`), or a token.

Answers are read in a process of its own (`reading.py`), since members may have sent anything.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from weakref import WeakValueDictionary

from aiohttp import web

from paceline_protocol.coordinator import Session
from paceline_server.blocking_calls import call_apart
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import BadRequest, Draining, NoRoom, NotFound, PermissionDenied, Refused
from paceline_server.services.admin import AdminHandlers
from paceline_server.services.audit import Audit, Caller
from paceline_server.web.reading import Reader
from paceline_server.web.sending import Sending
from paceline_server.web.web_limits import WebLimits
from paceline_server.wire import to_duration
from pacelinepb.debug.apart import stacks_request, trace_request
from pacelinepb.debug.gathered import Answered, read_answers, without_members
from pacelinepb.debug.output_answers import read_output_answer
from pacelinepb.debug.stack_answers import SIGNALLED_S, neighbours
from pacelinepb.status_json import stragglers
from pacelinepb.v1 import admin_pb2 as pb
from pacelinepb.v1 import session_pb2

OWN_HEADER = "X-Paceline"
"""The page sends it with each request, whatever its value; users of other programs add it."""

_OWN_SITE = (None, "same-origin", "none")
"""Values of Sec-Fetch-Site for requests of the page itself, of the address bar, and of programs other than browsers."""

_ASK_S = 5.0
"""Seconds for all members to answer with their stacks or output; the neighbours of silent ones have as long again."""

_ASK_TRACE_S = 20.0


class Asking:
    """Handlers of the questions.

    `caller` says who makes a request, `payer` at whose cost, and `operated` which job it is about, if the caller may
    operate that.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        admin: AdminHandlers,
        audit: Audit,
        caller: Callable[[web.Request], Awaitable[Caller]],
        payer: Callable[[web.Request], str],
        operated: Callable[[web.Request], Awaitable[str]],
        limits: WebLimits,
    ) -> None:
        self._dispatcher = dispatcher
        self._admin = admin
        self._audit = audit
        self._caller = caller
        self._payer = payer
        self._operated = operated
        self._limits = limits
        self._stacks_of = Reader("paceline debug stacks", limits)
        self._trace_of = Reader("paceline debug trace", limits)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._jobs = asyncio.Semaphore(limits.most_jobs_asked)
        self._sending = Sending(limits)
        dispatcher.vitals.memory["answers"] = self._sending.budget

    def add_to(self, app: web.Application) -> None:
        """Registers the paths."""
        app.router.add_get("/api/jobs/{name}/output", self._output)
        app.router.add_get("/api/jobs/{name}/stacks", self._stacks)
        app.router.add_get("/api/jobs/{name}/trace", self._trace)

    # Handlers ---------------------------------------------------------------------------------------------------------

    async def _output(self, request: web.Request) -> web.Response:
        """The last lines that one member has printed."""
        if not request.query.get("member"):
            raise BadRequest("name a member: ?member=ID")
        async with self._asking(request, session_pb2.QUESTION_OUTPUT, self._limits.stacks_s) as asked:
            (answer,) = await self._answers(asked, 1, _ASK_S)

            def read() -> bytes:
                lines, trouble = ([], answer.trouble) if answer.trouble else read_output_answer(answer.data)
                return json.dumps({"lines": lines, "trouble": trouble}).encode()

            body = await call_apart(read, "paceline-output", self._limits.stacks_s)
            return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _stacks(self, request: web.Request) -> web.StreamResponse:
        """The stacks of one member, or of all; those that do not answer are signalled by neighbours."""
        async with self._asking(request, session_pb2.QUESTION_STACKS, self._limits.stacks_s) as asked:
            limits = self._limits
            most, members = limits.most_stacks, len(self._sessions(asked.job))
            if asked.members:  # the name of a replica is that of all its members
                most = members = limits.most_traced
            share = limits.stacks_bytes // max(limits.most_traced, members)
            answers = await self._answers(asked, most, _ASK_S, share)
            detail = await self._admin.GetJob(pb.GetJobRequest(job=asked.job))
            if not answers:
                raise NotFound(without_members(detail))
            said = await self._of_neighbours(asked.job, answers, detail, share)
            body = await self._stacks_of.read(stacks_request(answers, asked.job, said))
        return self._sending.answer(request, self._payer(request), body)

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        """A trace of all members' operations, steps and messages, as `paceline debug trace` writes it."""
        async with self._asking(request, session_pb2.QUESTION_RECORDS, self._limits.trace_s) as asked:
            most, left_out = self._limits.most_traced, ""
            detail = await self._admin.GetJob(pb.GetJobRequest(job=asked.job))
            there = self._sessions(asked.job)
            if not asked.members and len(there) > most:
                asked.members.extend(chosen_members(detail, there, most))
                left_out = (
                    f"{len(there) - len(asked.members)} of {len(there)} members were not asked: those that hold others "
                    "up came first, then by rank; paceline debug trace asks all"
                )
            answers = await self._answers(asked, most, _ASK_TRACE_S)
            events = await self._events(asked.job)
            body = await self._trace_of.read(trace_request(answers, detail, events, [left_out] if left_out else []))
        response = self._sending.answer(request, self._payer(request), body)
        file = re.sub(r"[^A-Za-z0-9._-]", "_", asked.job)
        response.headers["Content-Disposition"] = f'attachment; filename="{file}.trace.json"'
        if left_out:
            response.headers["X-Paceline-Left-Out"] = left_out
        return response

    # Who may ask, and when --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asking(
        self, request: web.Request, what: session_pb2.Question.ValueType, seconds: float
    ) -> AsyncIterator[pb.AskMembersRequest]:
        """Lets a caller ask that may, with a line in the audit log, for some seconds.

        Yields the question, to the member that the request names, or to all. One at a time asks all members of a job.
        """
        member = request.query.get("member")
        members = [member] if member else []
        with self._audit.of("AskMembers", await self._caller(request)) as action:
            action.job, action.members = request.match_info["name"], members
            action.question = session_pb2.Question.Name(what).removeprefix("QUESTION_").lower()
            job = await self._operated(request)
            _check_own(request)
            if self._dispatcher.draining:
                raise Draining("the coordinator is stopping")
            try:
                async with asyncio.timeout(seconds), self._turn(job, members):
                    yield pb.AskMembersRequest(job=job, what=what, members=members)
            except TimeoutError:
                raise NoRoom(f"the members' answers were not there within {seconds:g} s: ask again") from None

    @asynccontextmanager
    async def _turn(self, job: str, members: Sequence[str]) -> AsyncIterator[None]:
        if members:
            yield
            return
        lock = self._locks.setdefault(job, asyncio.Lock())
        async with lock, self._jobs:
            yield

    # What is asked ----------------------------------------------------------------------------------------------------

    async def _answers(
        self,
        asked: pb.AskMembersRequest,
        most: int,
        longest: float,
        share: int | None = None,
        pids_of: Mapping[str, Sequence[int]] | None = None,
    ) -> list[Answered]:
        """Asks members for `longest` seconds; an answer of more than `share` bytes is left out."""
        found = []
        async with aclosing(self._admin.answers(asked, most, longest, pids_of)) as answers:
            async for answer in answers:
                if share is not None and len(answer.data) > share:
                    answer.trouble = f"has sent {len(answer.data):,} bytes, which is more than there is room for here"
                    answer.data = b""
                found.append(answer)
        return read_answers(found)

    async def _of_neighbours(
        self, job: str, answers: Sequence[Answered], detail: pb.GetJobResponse, share: int
    ) -> list[tuple[list[Answered], Answered | None]]:
        """Asks members for the stacks of silent neighbours, all hosts at once; returns those, and what is said of them.

        A member is asked for some neighbours at a time. So on a host with many silent members others take part.
        """
        silent = [each for each in answers if each.trouble]
        hanging = {each.member.member_id for each in silent}
        there = [each.member for each in detail.members if each.attached and each.member.member_id not in hanging]
        groups = neighbours(silent, there)
        asked = pb.AskMembersRequest(job=job, what=session_pb2.QUESTION_STACKS)
        asked.patience.CopyFrom(to_duration(SIGNALLED_S))
        sessions = self._sessions(job)
        pids_of: dict[str, list[int]] = {}
        for helper, of in groups:
            if helper is not None and helper.member_id in sessions:
                pids_of.setdefault(helper.member_id, [each.member.process.pid for each in of])
        said: dict[str, Answered] = {}
        if pids_of:
            asked.members.extend(pids_of)
            try:
                found = await self._answers(asked, len(pids_of), _ASK_S, share, pids_of)
                said = {each.member.member_id: each for each in found}
            except Refused:  # one has gone meanwhile, or there are too many questions
                pass
        # Of several groups of one helper the first was asked for.
        return [(of, said.pop(helper.member_id, None) if helper is not None else None) for helper, of in groups]

    async def _events(self, job: str) -> pb.ListEventsResponse:
        """All events of a job that are kept."""
        found = pb.ListEventsResponse()
        request = pb.ListEventsRequest(job=job)
        while (answer := await self._admin.ListEvents(request)).next > request.after:
            found.events.extend(answer.events)
            request.after = answer.next
        return found

    def _sessions(self, job: str) -> Mapping[str, Session]:
        found = self._dispatcher.find(job)
        return {} if found is None else found.membership.state.sessions


def chosen_members(detail: pb.GetJobResponse, there: Container[str], most: int) -> list[str]:
    """Chooses the members of a trace that are still `there`: first those that hold others up, then by rank."""
    behind = stragglers(detail)
    first = sorted(
        (each for each in detail.members if each.member.member_id in there),
        key=lambda each: each.attached and each.standing != "silent" and each.member.member_id not in behind,
    )
    return [each.member.member_id for each in first[:most]]


def _check_own(request: web.Request) -> None:
    """Refuses what a foreign page can make a browser send."""
    if request.headers.get("Sec-Fetch-Site") not in _OWN_SITE:
        raise PermissionDenied("another page must not ask members")
    if OWN_HEADER not in request.headers and "Authorization" not in request.headers:
        raise PermissionDenied(f"a question to members needs a header that no other page can send: {OWN_HEADER}: page")
