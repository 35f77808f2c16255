"""Calls to coordinators and doors: options of channels, the typed error of a failed call, and when to try again."""

from __future__ import annotations

import random

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline import errors
from paceline._grpc import aio, grpc
from pacelinepb import ERROR_DOMAIN
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = [
    "CHANNEL_OPTIONS",
    "backoff",
    "call_options",
    "channel_options",
    "duration",
    "error_from_status",
    "error_type",
    "is_transient",
]

_BACKOFF_FIRST, _BACKOFF_MOST = 0.05, 1.0
"""Seconds from one attempt to the next: doubled each time, with jitter."""

_PAUSE, _TRY = "grpc.max_reconnect_backoff_ms", "grpc.min_reconnect_backoff_ms"
"""The longest pause between two tries to connect; and, whatever it is called, the time that one may take (grpc's
doc/connection-backoff.md): a far or busy host needs it, above all for TLS."""

_LONGEST_TRY_MS = 2000

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    (_TRY, _LONGEST_TRY_MS),
    (_PAUSE, 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.enable_http_proxy", 0),
]
"""Of a channel for a few calls. grpc's own backoff grows to 120 s, which no recovery can wait for, and it would look
for a coordinator that has moved to another address once in 30 s."""


def call_options(seconds: float) -> list[tuple[str, int]]:
    """Options of a channel for one call of so many seconds: half of them are for a try to connect, at most.

    So there is time left to hear from grpc why it failed.
    """
    longest = max(100, min(_LONGEST_TRY_MS, round(seconds * 500)))
    return [(name, longest if name == _TRY else value) for name, value in CHANNEL_OPTIONS]


def channel_options(failure_timeout: float, *, alone: bool = False) -> list[tuple[str, int]]:
    """Options of a channel whose connection ends when the other host has acknowledged nothing for that long.

    With a keepalive timeout gRPC sets TCP_USER_TIMEOUT. Its pings are not wanted: a peer that is only busy answers them
    late, and one that sees many of them closes the connection.

    Args:
        failure_timeout: seconds.
        alone: the channel shares nothing with others, so it tries to connect at once.
    """
    pause = max(100, min(1000, round(failure_timeout * 1000 / 6)))  # a member that comes back late is taken for lost
    limits = {_PAUSE: pause, _TRY: max(100, min(_LONGEST_TRY_MS, round(failure_timeout * 1000 / 3)))}
    reconnect = [(name, limits.get(name, value)) for name, value in CHANNEL_OPTIONS]
    silence = [("grpc.keepalive_time_ms", 3_600_000), ("grpc.keepalive_timeout_ms", round(failure_timeout * 1000))]
    return reconnect + silence + ([("grpc.use_local_subchannel_pool", 1)] if alone else [])


_TYPES: dict[int, type[errors.PacelineError]] = {
    ErrorReason.ERROR_REASON_BAD_REQUEST: errors.PacelineError,
    ErrorReason.ERROR_REASON_NOT_FOUND: errors.PacelineError,
    ErrorReason.ERROR_REASON_STALE_GENERATION: errors.StaleGeneration,
    ErrorReason.ERROR_REASON_SESSION_ENDED: errors.SessionClosed,
    ErrorReason.ERROR_REASON_RANK_TAKEN: errors.SettingsMismatch,
    ErrorReason.ERROR_REASON_INVALID_RANK: errors.InvalidRank,
    ErrorReason.ERROR_REASON_INVALID_WORLD_SIZE: errors.InvalidWorldSize,
    ErrorReason.ERROR_REASON_SETTINGS_DISAGREE: errors.SettingsMismatch,
    ErrorReason.ERROR_REASON_CONFLICT: errors.StoreConflict,
    ErrorReason.ERROR_REASON_LIMIT: errors.LimitExceeded,
    ErrorReason.ERROR_REASON_DRAINING: errors.CoordinatorUnreachable,
    ErrorReason.ERROR_REASON_TIMEOUT: errors.OperationTimeout,
    ErrorReason.ERROR_REASON_PEER_LOST: errors.PeerLost,
    ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL: errors.PeerBrokeProtocol,
    ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH: errors.CollectiveMismatch,
    ErrorReason.ERROR_REASON_PEER_RAISED: errors.PeerRaised,
    ErrorReason.ERROR_REASON_VERSION: errors.CoordinatorUnreachable,
    ErrorReason.ERROR_REASON_UNAUTHENTICATED: errors.NotAuthenticated,
    ErrorReason.ERROR_REASON_PERMISSION_DENIED: errors.NotPermitted,
    ErrorReason.ERROR_REASON_DAMAGED: errors.CoordinatorUnreachable,
}


def error_type(reason: int) -> type[errors.PacelineError]:
    """The exception that a reason stands for; the root of the tree for one that is new to this version."""
    return _TYPES.get(reason, errors.PacelineError)


def error_from_status(error: aio.AioRpcError, doing: str) -> errors.PacelineError:
    """The typed error that a failed call stands for.

    Args:
        error: what grpc raised.
        doing: the call in words, for statuses that are not Paceline's own.
    """
    name = _reason(error)
    if name is not None:
        reason = ErrorReason.Value(name) if name in ErrorReason.keys() else 0  # noqa: SIM118  # not a dict
        kind, text = error_type(reason), error.details() or name
        if issubclass(kind, (errors.NotAuthenticated, errors.NotPermitted)):
            text = f"{doing}: {text}"  # whose tokens, is the question
        return kind(text)
    text = f"{doing}: {error.details() or error.code().name}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.OperationTimeout(text)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # grpc's own word for a message that is too long
        return errors.LimitExceeded(text)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.CoordinatorUnreachable(f"{doing}: a gRPC server answers there, but it is no Paceline coordinator")
    return errors.CoordinatorUnreachable(text)


def _reason(error: aio.AioRpcError) -> str | None:
    """The name of Paceline's reason for a refusal; None if the status holds none that can be read."""
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what is read of a Call
        for detail in status.details if status is not None else ():
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                return f"ERROR_REASON_{info.reason}"
    except (ValueError, DecodeError):  # details that contradict the status, or are none: no Paceline answers there
        return None
    return None


def is_transient(error: aio.AioRpcError) -> bool:
    """True if the same call may succeed later: the other side is away, starting or stopping, or bytes have changed.

    UNKNOWN ("Stream removed") and INTERNAL ("Internal error from Core", where a write found it out first) are what grpc
    itself says of a stream whose connection was lost; no coordinator says them. DATA_LOSS is said of a message that has
    changed on the way.
    """
    return error.code() in _TRANSIENT


_TRANSIENT = frozenset(
    (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
    )
)


def backoff(attempt: int) -> float:
    """Seconds to wait before an attempt that follows so many others."""
    return random.uniform(0.5, 1.0) * min(_BACKOFF_MOST, _BACKOFF_FIRST * 2.0 ** min(attempt, 10))


_CENTURY = 3.15e9


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration; a century stands for what is longer."""
    result = Duration()
    result.FromNanoseconds(round(min(seconds, _CENTURY) * 1e9))
    return result
