"""From the wire to the error tree: one table from ErrorReason to exception type, and what to do with a failed call."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline import errors
from paceline._grpc import aio, grpc
from pacelinepb import ERROR_DOMAIN
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["CHANNEL_OPTIONS", "duration", "error_from_status", "error_type", "is_transient"]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]
"""Of every channel that Paceline opens: gRPC's own backoff grows to 120 s, which no recovery can wait for."""

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
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what is read of a Call
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            name = f"ERROR_REASON_{info.reason}"
            reason = ErrorReason.Value(name) if name in ErrorReason.keys() else 0  # noqa: SIM118  # not a dict
            return error_type(reason)(error.details() or name)
    text = f"{doing}: {error.details() or error.code().name}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.OperationTimeout(text)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.CoordinatorUnreachable(f"{doing}: a gRPC server answers there, but it is no Paceline coordinator")
    return errors.CoordinatorUnreachable(text)


def is_transient(error: aio.AioRpcError) -> bool:
    """True if the same call may succeed later: the other side is away, starting or stopping."""
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration."""
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result
