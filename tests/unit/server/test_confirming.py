"""Answers and refusals that leave only once the storage has confirmed that this coordinator leads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline_server._grpc import grpc
from paceline_server.errors import NotFound, PermissionDenied, Refused, SessionEnded, Unauthenticated
from paceline_server.services.confirming import ConfirmingInterceptor
from paceline_server.storage.memory import MemoryStorage
from support.coordinator import run


@pytest.mark.parametrize(
    ("refusal", "confirmed"),
    [(None, 1), (SessionEnded, 1), (NotFound, 1), (Unauthenticated, 0), (PermissionDenied, 0)],
)
def test_all_answers_except_token_refusals_confirm_leadership(refusal: type[Refused] | None, confirmed: int) -> None:
    calls: list[None] = []

    class Storage(MemoryStorage):
        async def confirm(self) -> None:
            calls.append(None)

    async def handle(request: object, context: object) -> object:
        if refusal is not None:
            raise refusal("no")
        return request

    async def continuation(_: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(handle)

    async def main() -> None:
        details: Any = SimpleNamespace(method="/pacelinepb.v1.AdminService/ListJobs")
        handler: Any = await ConfirmingInterceptor(Storage()).intercept_service(continuation, details)
        if refusal is None:
            assert await handler.unary_unary("request", None) == "request"
        else:
            with pytest.raises(refusal):
                await handler.unary_unary("request", None)
        assert len(calls) == confirmed

    run(main)
