"""One line of log for each call of an operator: who, from where, what, on which job and members, and its outcome.

The logger is `paceline.audit`. A line is one JSON object in ASCII, so that nothing in a request, such as a job's name,
can end the line or look like another one. No line has a token: a token is named by its line in the token file.

A caller whose token is unknown, or good for less, is no operator, and may call as often as it likes. So about such
refusals there is one line in `_PERIOD_S` for each call and token, with how many there were.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from paceline_server._grpc import aio, grpc
from paceline_server.errors import PermissionDenied, Refused, Unauthenticated
from paceline_server.security.token_file import TokenKeeper
from paceline_server.security.tokens import Role
from paceline_server.services.authenticate import authorization_of, role_for
from pacelinepb.remarks import Remarks
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.session_pb2 import Question

_log = logging.getLogger("paceline.audit")

_PERIOD_S = 60.0

_MOST_MEMBERS = 20
"""The most members in a line, as the caller named them; a request may have 5,000."""

_MOST_CHARACTERS = 128
"""The most characters of a name; a longer one is no job's, and is cut."""

_ACTIONS = frozenset(
    name
    for method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods
    if role_for(name := f"/{method.containing_service.full_name}/{method.name}") is Role.OPERATOR
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an operation, as far as it is known.

    `certificate` is the common name of the subject in the caller's. `token` is in words, and None if callers need none;
    `role` is None without a valid one.
    """

    address: str
    certificate: str | None
    token: str | None = None
    role: str | None = None


@dataclass(slots=True)
class Action:
    """A caller's request for an action, filled in as it is read; with no `members` it is about all."""

    job: str | None = None
    members: Sequence[str] = ()
    question: str = ""


class Audit:
    """Writes the lines."""

    def __init__(self, tokens: TokenKeeper | None) -> None:
        self._tokens = tokens
        self._remarks = Remarks(_PERIOD_S)

    async def caller(self, address: str, certificate: str | None, authorization: str | None) -> Caller:
        """Says who calls, before the call is made: its token may be gone at the end."""
        if self._tokens is None:
            return Caller(address, certificate)
        try:
            grant = (await self._tokens.current()).grant(authorization)
        except Unauthenticated:
            return Caller(address, certificate, "none" if authorization is None else "unknown")
        token = f"line {grant.line}" if grant.line else "the only one"
        return Caller(address, certificate, token, grant.role.name.lower())

    @contextmanager
    def of(self, call: str, caller: Caller) -> Iterator[Action]:
        """Writes the line of a call at the end of the block, which may raise what the call ends with."""
        action = Action()
        try:
            yield action
        except (Unauthenticated, PermissionDenied) as refused:
            if times := self._remarks.count((call, caller.token), asyncio.get_running_loop().time()):
                self._write(call, caller, action, "refused", reason=_reason(refused), times=times)
            raise
        except Refused as refused:
            self._write(call, caller, action, "refused", reason=_reason(refused))
            raise
        except asyncio.CancelledError:
            self._write(call, caller, action, "cancelled")
            raise
        except Exception:
            self._write(call, caller, action, "failed")
            raise
        self._write(call, caller, action, "done")

    def _write(self, call: str, caller: Caller, action: Action, outcome: str, **more: object) -> None:
        line: dict[str, object] = {"audit": call, "outcome": outcome, **more, "job": _cut(action.job)}
        if action.question:
            line["question"] = action.question
        line["members"] = [_cut(each) for each in action.members[:_MOST_MEMBERS]] or None
        if len(action.members) > _MOST_MEMBERS:
            line["members_named"] = len(action.members)
        line |= {"from": caller.address, "token": caller.token, "role": caller.role}
        line["certificate"] = _cut(caller.certificate)
        _log.info("%s", json.dumps({name: value for name, value in line.items() if value is not None}))


class AuditInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Has a line written about each call that needs an operator's role."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wraps the handlers of an operator's calls."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if not handler or method not in _ACTIONS:
            return handler
        make: Any = grpc.stream_stream_rpc_method_handler
        inner: Any = handler.stream_stream  # a refusal's, which reads no request
        if handler.unary_unary is not None:
            make, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        elif handler.unary_stream is not None:
            make, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        is_read = inner is not handler.stream_stream
        authorization = authorization_of(handler_call_details)

        async def handle(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            address = unquote(context.peer()).partition(":")[2]
            caller = await self._audit.caller(address, _common_name(context), authorization)
            with self._audit.of(method.rpartition("/")[2], caller) as action:
                if is_read:
                    _read(request, action)
                return await inner(request, context)

        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            handle, handler.request_deserializer, handler.response_serializer
        )
        return wrapped


def _read(request: Any, action: Action) -> None:
    action.job = request.job
    if isinstance(request, (admin_pb2.DrainMembersRequest, admin_pb2.AskMembersRequest)):
        action.members = request.members
    if isinstance(request, admin_pb2.AskMembersRequest):
        known = request.what in Question.values()
        action.question = Question.Name(request.what).removeprefix("QUESTION_").lower() if known else "unknown"


def _reason(refused: Refused) -> str:
    return ErrorReason.Name(refused.reason).removeprefix("ERROR_REASON_")


def _common_name(context: aio.ServicerContext[Any, Any]) -> str | None:
    names = context.auth_context().get("x509_common_name", ())
    return next((name.decode(errors="replace") for name in names), None)


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
