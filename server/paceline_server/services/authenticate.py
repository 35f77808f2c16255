"""Checks the token of every call to every service before its handler sees it.

Health's Check is open to all, because probes have no tokens. Its Watch, which has no time limit, needs a token, and so
does reflection. `JOB_OF` says where each of our requests names its job; a method that is missing there is refused if
the token is for one job only. `role_for` says which role a method needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from paceline_server._grpc import EOF, aio, grpc
from paceline_server.errors import PermissionDenied, Refused, Unauthenticated
from paceline_server.security.token_file import TokenKeeper
from paceline_server.security.tokens import Grant, Role
from paceline_server.services.probes import PROBE
from paceline_server.services.refusals import OURS, refuse
from paceline_server.vitals import Vitals
from pacelinepb.v1 import admin_pb2, session_pb2

_SESSION = "/pacelinepb.v1.SessionService/Session"

_FIRST = ("register", "resume")
"""Kinds of a session's first message; the handler refuses any other kind."""

LIST_JOBS = "/pacelinepb.v1.AdminService/ListJobs"
_GET_JOB = "/pacelinepb.v1.AdminService/GetJob"
"""The method that is about no single job: with a token for one job, it lists only that job."""


def _named(request: Any) -> str:
    return str(request.job)


def _callers(request: Any) -> str:
    return str(request.caller.job)


def _first(request: session_pb2.SessionRequest) -> str:
    """Returns the job of a session's first message, which is of one of the kinds in `_FIRST`."""
    return request.resume.job if request.WhichOneof("event") == "resume" else request.register.job


JOB_OF: Mapping[str, Callable[[Any], str]] = {
    _SESSION: _first,
    "/pacelinepb.v1.SessionService/GetView": _named,
    "/pacelinepb.v1.SessionService/ReportExit": _named,
    "/pacelinepb.v1.SessionService/AnswerAsk": _named,
    **{
        f"/pacelinepb.v1.StoreService/{method}": _callers
        for method in ("Set", "Get", "Add", "CompareSet", "Wait", "Delete")
    },
    _GET_JOB: _named,
    "/pacelinepb.v1.AdminService/DrainMembers": _named,
    "/pacelinepb.v1.AdminService/RestartJob": _named,
    "/pacelinepb.v1.AdminService/ForgetJob": _named,
    "/pacelinepb.v1.AdminService/AskMembers": _named,
    "/pacelinepb.v1.AdminService/ListEvents": _named,
}
"""Maps the full name of a method to the job of its request; a test compares this table with the services."""

_ADMIN = "/pacelinepb.v1.AdminService/"

_READING = frozenset((LIST_JOBS, _GET_JOB, f"{_ADMIN}ListEvents"))


def role_for(method: str) -> Role:
    """Returns the role that a call needs."""
    if method in _READING or not method.startswith(OURS):
        return Role.READ
    return Role.OPERATOR if method.startswith(_ADMIN) else Role.WORKER


_Next = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]]


class AuthenticationInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Lets a call through if its token is valid, is good for its job and has the role that the call needs."""

    def __init__(self, tokens: TokenKeeper, vitals: Vitals) -> None:
        self._tokens = tokens
        self._vitals = vitals

    async def intercept_service(
        self, continuation: _Next, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Replaces the handler by a refusal, or by a handler that checks the job first."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if not handler or method == PROBE:  # grpc gives None for a method that is not served
            return handler
        try:
            grant = (await self._tokens.current()).grant(authorization_of(handler_call_details))
            grant.check_role(role_for(method))
        except (Unauthenticated, PermissionDenied) as refused:
            return self._refusal(refused, ours=method.startswith(OURS))
        if method == _GET_JOB:
            handler = _unary(handler, _seeing(handler.unary_unary, grant.role))
        if grant.jobs is None:
            return handler
        if method == LIST_JOBS:
            return _unary(handler, _listing(handler.unary_unary, grant))
        if method == _SESSION:
            return _stream(handler, _opening(handler.stream_stream, grant))
        if method in JOB_OF:
            asking = _asking(handler.unary_unary or handler.unary_stream, grant, JOB_OF[method])
            return _unary(handler, asking) if handler.unary_stream is None else _answers(handler, asking)
        about_none = PermissionDenied("the token is valid for one job, but this call is not about a job")
        return self._refusal(about_none, ours=method.startswith(OURS))

    def _refusal(self, refused: Refused, *, ours: bool) -> grpc.RpcMethodHandler[Any, Any]:
        """Makes a handler that ends the call at once and reads nothing of it.

        The handler is always a stream's: for a unary handler, grpc waits for the whole request without a time limit.
        """

        async def handle(request: Any, context: Any) -> Any:
            if ours:  # `RefusalInterceptor` makes the status of all refusals of our services
                raise refused
            await refuse(context, refused, self._vitals)

        stream: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(handle)
        return stream


def authorization_of(details: grpc.HandlerCallDetails) -> str | None:
    """Returns the value of `authorization` in a call's metadata; None if there is none."""
    for name, value in details.invocation_metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else None
    return None


def jobs_of(context: object) -> frozenset[str] | None:
    """Returns the jobs that the token of a session's caller is good for; None for all jobs, or without tokens."""
    return context.jobs if isinstance(context, _Opening) else None


def _asking(handler: Any, grant: Grant, job_of: Callable[[Any], str]) -> Any:
    async def handle(request: Any, context: Any) -> Any:
        grant.check(job_of(request))
        return await handler(request, context)

    return handle


def _listing(handler: Any, grant: Grant) -> Any:
    async def handle(request: admin_pb2.ListJobsRequest, context: Any) -> admin_pb2.ListJobsResponse:
        answer = await handler(request, context)
        seen = [job for job in answer.jobs if grant.allows(job.name)]
        return admin_pb2.ListJobsResponse(jobs=seen, leader=answer.leader if answer.HasField("leader") else None)

    return handle


def seen_by(role: Role, answer: admin_pb2.GetJobResponse) -> admin_pb2.GetJobResponse:
    """Returns a job as callers with a role see it: what its workers have printed is for its operators alone.

    A script prints what it likes, of its data too. `answer` stays as it is, since others are given it too.
    """
    if role >= Role.OPERATOR or not any(gone.output for gone in answer.gone):
        return answer
    seen = admin_pb2.GetJobResponse()
    seen.CopyFrom(answer)
    for gone in seen.gone:
        gone.output = ""
    return seen


def _seeing(handler: Any, role: Role) -> Any:
    async def handle(request: admin_pb2.GetJobRequest, context: Any) -> admin_pb2.GetJobResponse:
        return seen_by(role, await handler(request, context))

    return handle


def _opening(handler: Any, grant: Grant) -> Any:
    async def handle(requests: Any, context: Any) -> None:
        await handler(requests, _Opening(context, grant))

    return handle


class _Opening:
    """The context of a session's stream. It checks the job of the first message; later messages pass unchanged."""

    def __init__(self, context: Any, grant: Grant) -> None:
        self._context = context
        self._grant = grant
        self.jobs = grant.jobs
        self.read = self._read_first
        self.write = context.write

    async def _read_first(self) -> Any:
        first = await self._context.read()
        self.read = self._context.read
        if first is not EOF and first.WhichOneof("event") in _FIRST:
            self._grant.check(JOB_OF[_SESSION](first))
        return first


def _unary(like: grpc.RpcMethodHandler[Any, Any], behavior: Any) -> grpc.RpcMethodHandler[Any, Any]:
    made: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
        behavior, like.request_deserializer, like.response_serializer
    )
    return made


def _answers(like: grpc.RpcMethodHandler[Any, Any], behavior: Any) -> grpc.RpcMethodHandler[Any, Any]:
    made: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        behavior, like.request_deserializer, like.response_serializer
    )
    return made


def _stream(like: grpc.RpcMethodHandler[Any, Any], behavior: Any) -> grpc.RpcMethodHandler[Any, Any]:
    made: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        behavior, like.request_deserializer, like.response_serializer
    )
    return made
