"""Calls to coordinators and doors: channel options, the typed error of a failed call, and when to try again.

The package imports grpc only from here, set up as `pacelinepb.safe_grpc` says.
"""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from paceline import errors
from pacelinepb import ERROR_DOMAIN, RELEASE
from pacelinepb.safe_grpc import EOF as EOF
from pacelinepb.safe_grpc import aio as aio
from pacelinepb.safe_grpc import grpc as grpc
from pacelinepb.safe_grpc import rpc_status as rpc_status
from pacelinepb.v1.errors_pb2 import ErrorReason


def hold_aio() -> None:
    """Keeps grpc.aio running for as long as the process lives; call it on the loop that grpc.aio uses.

    Otherwise it shuts down when its last object is freed, in whichever thread frees it (a traceback may hold a channel,
    for example). It then closes the socket by which its poller wakes the loop, while the loop still reads from it:
    "Exception in callback None()", OSError 9 (grpcio 1.85.1).
    """
    aio.init_grpc_aio()  # type: ignore[attr-defined]  # not in grpc-stubs


def untyped(value: Any) -> Any:
    """Returns a grpc.aio object typed as Any: grpc-stubs lacks the defaults of arguments that we leave out."""
    return value


_VERSION = "ERROR_REASON_VERSION"

_BACKOFF_FIRST, _BACKOFF_MOST = 0.05, 1.0
"""First and longest pause between attempts, in seconds; it doubles each time, with jitter."""

_PAUSE, _TRY = "grpc.max_reconnect_backoff_ms", "grpc.min_reconnect_backoff_ms"
"""The longest pause between two tries to connect, and, despite its name, the time that one try may take (grpc's
doc/connection-backoff.md): a distant or busy host needs it, above all for TLS."""

_LONGEST_TRY_MS = 2000

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    (_TRY, _LONGEST_TRY_MS),
    (_PAUSE, 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.enable_http_proxy", 0),
]
"""Options of a channel for a few calls. grpc's own backoff grows to 120 s, which is too long for a recovery, and grpc
would look up a coordinator that has moved to another address only once in 30 s."""


def call_options(seconds: float) -> list[tuple[str, int]]:
    """Returns options of a channel for one call of this many seconds; a try to connect may take half of them.

    So grpc has time left to report why it failed.
    """
    longest = max(100, min(_LONGEST_TRY_MS, round(seconds * 500)))
    return [(name, longest if name == _TRY else value) for name, value in CHANNEL_OPTIONS]


def channel_options(failure_timeout: float, *, alone: bool = False) -> list[tuple[str, int]]:
    """Returns options of a channel whose connection ends after the other host has acknowledged nothing for that long.

    With a keepalive timeout gRPC sets TCP_USER_TIMEOUT. Pings are an hour apart: a peer that is only busy answers them
    late, and a peer that gets many of them closes the connection. A channel that is `alone` shares nothing with others,
    so it tries to connect at once.
    """
    pause = max(100, min(1000, round(failure_timeout * 1000 / 6)))  # a member that reconnects late counts as lost
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
    ErrorReason.ERROR_REASON_NOT_LEADER: errors.CoordinatorUnreachable,
    ErrorReason.ERROR_REASON_STEP_DIFFERS: errors.StepOrderError,
    ErrorReason.ERROR_REASON_STEP_SKIPPED: errors.StepSkipped,
    ErrorReason.ERROR_REASON_REPLICA_LOST: errors.ReplicaLost,
}


def error_type(reason: int) -> type[errors.PacelineError]:
    """Returns the exception class of a reason; the base class for a reason that this version does not know."""
    return _TYPES.get(reason, errors.PacelineError)


def error_from_status(error: aio.AioRpcError, doing: str) -> errors.PacelineError:
    """Returns the typed error of a failed call; `doing` describes it, for statuses that do not come from Paceline."""
    name = _reason(error)
    if name is not None:
        reason = ErrorReason.Value(name) if name in ErrorReason.keys() else 0  # noqa: SIM118  # not a dict
        kind, text = error_type(reason), error.details() or name
        if name == _VERSION:
            text = f"{text} (the caller is {RELEASE})"
        if issubclass(kind, (errors.NotAuthenticated, errors.NotPermitted)):
            text = f"{doing}: {text}"  # so that the text says which call had the wrong token
        return kind(text)
    text = f"{doing}: {error.details() or error.code().name}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.OperationTimeout(text)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # grpc's status for a message that is too long
        return errors.LimitExceeded(text)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.CoordinatorUnreachable(
            f"{doing}: a gRPC server answers there, but it is not a Paceline coordinator"
        )
    return errors.CoordinatorUnreachable(text)


def nobody_answers(address: str, seconds: float, why: str) -> errors.CoordinatorUnreachable:
    """Returns the error for an address at which no coordinator has answered for so long.

    Of `why`, gRPC's long account, the last part says something.
    """
    return errors.CoordinatorUnreachable(
        f"no coordinator answers at {address} (tried for {seconds:.1f} s; {why.rpartition(': ')[2]}): run `paceline "
        f"coordinator --listen {address}` there, or correct the address (--coordinator, PACELINE_COORDINATOR)"
    )


def _reason(error: aio.AioRpcError) -> str | None:
    """Returns the name of Paceline's reason for a refusal; None if the status has no readable one."""
    info = _info(error)
    return None if info is None else f"ERROR_REASON_{info.reason}"


def is_leaving(error: aio.AioRpcError) -> bool:
    """Returns True if the other side has refused the call because it is leaving or stopping."""
    return _reason(error) == "ERROR_REASON_DRAINING"


def is_other_version(error: aio.AioRpcError) -> bool:
    """Returns True if the other side has refused the call because it speaks other versions of the protocol."""
    return _reason(error) == _VERSION


def leader_named_by(error: aio.AioRpcError) -> str | None:
    """Returns the leader's address, empty if it is not known, if a standby has refused the call; else None."""
    info = _info(error)
    return info.metadata.get("leader", "") if info is not None and info.reason == "NOT_LEADER" else None


def _info(error: aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has the parts of a Call that are read
        for detail in status.details if status is not None else ():
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                return info
    except (ValueError, DecodeError):  # details contradict the status or are invalid: not Paceline
        return None
    return None


def is_transient(error: aio.AioRpcError) -> bool:
    """Returns True if the call may succeed later: the other side is away, starting or stopping, or bytes were damaged.

    grpc itself reports UNKNOWN ("Stream removed") or INTERNAL ("Internal error from Core", if a write fails first) for
    a stream whose connection was lost; no coordinator does. DATA_LOSS means that a message was changed on the way.
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
    """Returns the seconds to wait before an attempt that follows `attempt` others."""
    return random.uniform(0.5, 1.0) * min(_BACKOFF_MOST, _BACKOFF_FIRST * 2.0 ** min(attempt, 10))


_CENTURY = 3.15e9


def duration(seconds: float) -> Duration:
    """Returns seconds as a protobuf Duration, at most a century."""
    result = Duration()
    result.FromNanoseconds(round(min(seconds, _CENTURY) * 1e9))
    return result
