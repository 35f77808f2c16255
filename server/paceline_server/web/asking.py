"""Questions of the page to members: the last lines that they have printed, their stacks, and a trace of all.

They take an operator's role and have a line in the audit log, as the same questions of commands (`AskMembers`), whose
limits hold. To answer costs members work, so no foreign page may make a browser ask, even if it could not read the
answer.

Answers are read on a thread: that may take a second, in which the coordinator's loop must go on.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from paceline_server.blocking_calls import call_apart
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import BadRequest, Draining, NotFound, PermissionDenied, Refused
from paceline_server.services.admin import AdminHandlers
from paceline_server.services.audit import Audit, Caller
from paceline_server.wire import to_duration
from pacelinepb.debug.gathered import Answered, draw_trace, gathered_from, read_answers, without_members
from pacelinepb.debug.output_answers import read_output_answer
from pacelinepb.debug.stack_answers import SIGNALLED_S, neighbours, process_of, processes_by, stacks_as_dict
from pacelinepb.v1 import admin_pb2 as pb
from pacelinepb.v1 import session_pb2

MOST_ASKED = 32
"""The most members of one question here: their answers are in memory together, 1 MiB each at most."""

_READ_S = 60.0
"""Seconds to read all answers of a question."""

_OWN_SITE = (None, "same-origin", "none")
"""Values of Sec-Fetch-Site for requests of the page itself, of the address bar, and of programs other than browsers."""


class Asking:
    """Handlers of the questions.

    `caller` says who makes a request, and `operated` which job it is about, if the caller may operate that.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        admin: AdminHandlers,
        audit: Audit,
        caller: Callable[[web.Request], Awaitable[Caller]],
        operated: Callable[[web.Request], Awaitable[str]],
    ) -> None:
        self._dispatcher = dispatcher
        self._admin = admin
        self._audit = audit
        self._caller = caller
        self._operated = operated
        self._all = asyncio.Lock()  # one at a time asks all members of a job

    def add_to(self, app: web.Application) -> None:
        """Registers the paths."""
        app.router.add_get("/api/jobs/{name}/output", self._output)
        app.router.add_get("/api/jobs/{name}/stacks", self._stacks)
        app.router.add_get("/api/jobs/{name}/trace", self._trace)

    async def _output(self, request: web.Request) -> web.Response:
        """The last lines that one member has printed."""
        if not request.query.get("member"):
            raise BadRequest("name a member: ?member=ID")
        (answer,) = await self._ask(request, session_pb2.QUESTION_OUTPUT, 1)

        def read() -> bytes:
            lines, trouble = ([], answer.trouble) if answer.trouble else read_output_answer(answer.data)
            return json.dumps({"lines": lines, "trouble": trouble}).encode()

        return await _read(read)

    async def _stacks(self, request: web.Request) -> web.Response:
        """The stacks of one member, or of all; those that do not answer are signalled by neighbours."""
        async with self._all:
            answers = await self._ask(request, session_pb2.QUESTION_STACKS)
            name = request.match_info["name"]
            detail = await self._admin.GetJob(pb.GetJobRequest(job=name))
            if not answers:
                raise NotFound(without_members(detail))
            silent = [each for each in answers if each.trouble]
            hanging = {each.member.member_id for each in silent}
            there = [each.member for each in detail.members if each.attached and each.member.member_id not in hanging]
            said = [await self._of_neighbours(name, *group) for group in neighbours(silent, there)]

            def read() -> bytes:
                found = {each.member.member_id: process_of(each) for each in answers}
                for of, neighbour in said:
                    for each, process in zip(of, processes_by(name, of, neighbour), strict=True):
                        found[each.member.member_id] = process
                processes = [stacks_as_dict(found[each.member.member_id], each) for each in answers]
                return json.dumps({"processes": processes}).encode()

            return await _read(read)

    async def _of_neighbours(
        self, name: str, helper: session_pb2.Member | None, silent: list[Answered]
    ) -> tuple[list[Answered], Answered | None]:
        """Asks a member for the stacks of neighbours; returns these, and what it says."""
        if helper is None:
            return silent, None
        pids = [each.member.process.pid for each in silent]
        request = pb.AskMembersRequest(
            job=name, what=session_pb2.QUESTION_STACKS, members=[helper.member_id], pids=pids
        )
        request.patience.CopyFrom(to_duration(SIGNALLED_S))
        try:
            return silent, (await self._answers(request, 1))[0]
        except Refused:  # it has gone meanwhile, or there are too many questions
            return silent, None

    async def _answers(self, request: pb.AskMembersRequest, most: int) -> list[Answered]:
        async with aclosing(self._admin.answers(request, most)) as answers:
            return read_answers([answer async for answer in answers])

    async def _trace(self, request: web.Request) -> web.Response:
        """A trace of all members' operations, steps and messages, as `paceline debug trace` writes it."""
        async with self._all:
            answers = await self._ask(request, session_pb2.QUESTION_RECORDS)
            name = request.match_info["name"]
            detail = await self._admin.GetJob(pb.GetJobRequest(job=name))
            events = await self._events(name)

            def draw() -> bytes:
                found = gathered_from(answers, detail)
                if not found.records:
                    raise NotFound(
                        "; ".join(["no flight record is there", *(found.missing if answers else [found.source])])
                    )
                return _dump_trace(draw_trace(found, events))

            response = await _read(draw)
        file = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        response.headers["Content-Disposition"] = f'attachment; filename="{file}.trace.json"'
        return response

    async def _events(self, name: str) -> list[pb.JobEvent]:
        """All events of a job that are kept."""
        found: list[pb.JobEvent] = []
        request = pb.ListEventsRequest(job=name)
        while (answer := await self._admin.ListEvents(request)).next > request.after:
            found += answer.events
            request.after = answer.next
        return found

    async def _ask(
        self, request: web.Request, what: session_pb2.Question.ValueType, most: int = MOST_ASKED
    ) -> list[Answered]:
        """Asks the member that a request names, or all, if the caller may."""
        member = request.query.get("member")
        members = [member] if member else []
        with self._audit.of("AskMembers", await self._caller(request)) as action:
            action.job, action.members = request.match_info["name"], members
            action.question = session_pb2.Question.Name(what).removeprefix("QUESTION_").lower()
            if request.headers.get("Sec-Fetch-Site") not in _OWN_SITE:
                raise PermissionDenied("another page must not ask members")
            asked = pb.AskMembersRequest(job=await self._operated(request), what=what, members=members)
            if self._dispatcher.draining:
                raise Draining("the coordinator is stopping")
            return await self._answers(asked, most)


async def _read(read: Callable[[], bytes]) -> web.Response:
    """Answers with JSON that is made on a thread."""
    body = await call_apart(read, "paceline-answers", _READ_S)
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _dump_trace(trace: dict[str, Any]) -> bytes:
    """Writes a trace piece by piece: json would hold the GIL, and so the coordinator, for 0.2 s."""
    drawn = ", ".join(json.dumps(each) for each in trace["traceEvents"])
    rest = json.dumps({name: value for name, value in trace.items() if name != "traceEvents"})
    return f'{{"traceEvents": [{drawn}], {rest[1:]}'.encode()
