"""Which failed calls may be tried again."""

from __future__ import annotations

import pytest

from paceline._grpc import aio, grpc
from paceline.session.wire import is_transient


@pytest.mark.parametrize(
    ("code", "transient"),
    [
        (grpc.StatusCode.UNAVAILABLE, True),
        (grpc.StatusCode.CANCELLED, True),
        (grpc.StatusCode.UNKNOWN, True),  # "Stream removed": a SIGKILLed coordinator's connection, now and then
        (grpc.StatusCode.INVALID_ARGUMENT, False),
        (grpc.StatusCode.FAILED_PRECONDITION, False),
        (grpc.StatusCode.UNIMPLEMENTED, False),
        (grpc.StatusCode.INTERNAL, False),
    ],
)
def test_a_lost_connection_is_transient_and_a_refusal_is_not(code: grpc.StatusCode, transient: bool) -> None:
    error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), "details", None)
    assert is_transient(error) is transient
