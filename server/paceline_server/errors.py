"""The reasons why the coordinator refuses, and the one table from refusal to gRPC status.

Refused
    BadRequest           the request itself is wrong: a bug or a user's mistake
    NotFound             no such job, member or key
    StaleGeneration      the generation acted upon is not the current one
    SessionEnded         the session has ended, or was never there
    ReplicaLost          a rank of the member's replica has ended
    Barred               the worker broke the protocol too often, and is not taken any more
    RankTaken            two members claim one rank
    InvalidRank          the rank is outside the world
    InvalidWorldSize     the world size is impossible
    SettingsDisagree     the member disagrees with its job on a setting
    LimitMet             a limit on size or number
    Draining             the coordinator is stopping
    TimedOut             what the caller waited for did not come in time
    VersionMismatch      two programs have no version of the protocol in common
    Unauthenticated      no token came, or an unknown one
    PermissionDenied     the token is good for another job, or for less
    Damaged              the bytes are no message: they changed on the way
    NotLeader            another coordinator leads

Handlers raise these and choose no codes; `services.refusals` turns them into a status with `google.rpc.ErrorInfo`.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline_protocol.coordinator import (
    BadRequest,
    Barred,
    InvalidRank,
    InvalidWorldSize,
    RankTaken,
    Refused,
    ReplicaLost,
    SessionEnded,
    SettingsDisagree,
    VersionMismatch,
)
from paceline_server._grpc import grpc
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = [
    "BadRequest",
    "Barred",
    "Damaged",
    "Draining",
    "InvalidRank",
    "InvalidWorldSize",
    "LimitMet",
    "NoRoom",
    "NotFound",
    "NotLeader",
    "PermissionDenied",
    "RankTaken",
    "Refused",
    "ReplicaLost",
    "SessionEnded",
    "SettingsDisagree",
    "StaleGeneration",
    "STATUS",
    "TimedOut",
    "Unauthenticated",
    "VersionMismatch",
]


class NotFound(Refused):
    """There is no such job, member or key."""

    reason = ErrorReason.ERROR_REASON_NOT_FOUND


class StaleGeneration(Refused):
    """The generation acted upon is not the current one."""

    reason = ErrorReason.ERROR_REASON_STALE_GENERATION


class LimitMet(Refused):
    """A limit on size or number is met; the text names it."""

    reason = ErrorReason.ERROR_REASON_LIMIT


class NoRoom(Refused):
    """There is no room for the call now, but there may be later."""

    reason = ErrorReason.ERROR_REASON_LIMIT


class Draining(Refused):
    """The coordinator is stopping; its successor may answer."""

    reason = ErrorReason.ERROR_REASON_DRAINING


class TimedOut(Refused):
    """The caller's wait timed out; the text lists what is missing."""

    reason = ErrorReason.ERROR_REASON_TIMEOUT


class Unauthenticated(Refused):
    """No token came, or an unknown one. The text says what to do and never repeats the token."""

    reason = ErrorReason.ERROR_REASON_UNAUTHENTICATED


class PermissionDenied(Refused):
    """The token is good for another job, or its role does not allow this call."""

    reason = ErrorReason.ERROR_REASON_PERMISSION_DENIED


class Damaged(Refused):
    """The bytes that came are no message of this call; the caller may repeat the call and succeed."""

    reason = ErrorReason.ERROR_REASON_DAMAGED


class NotLeader(Refused):
    """Another coordinator leads: the one at the address `leader`, which is empty if it is not known."""

    reason = ErrorReason.ERROR_REASON_NOT_LEADER

    def __init__(self, text: str, leader: str = "") -> None:
        super().__init__(text)
        self.leader = leader


STATUS: Mapping[type[Refused], grpc.StatusCode] = {
    BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    StaleGeneration: grpc.StatusCode.FAILED_PRECONDITION,
    SessionEnded: grpc.StatusCode.FAILED_PRECONDITION,
    ReplicaLost: grpc.StatusCode.FAILED_PRECONDITION,
    Barred: grpc.StatusCode.FAILED_PRECONDITION,
    RankTaken: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidRank: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidWorldSize: grpc.StatusCode.INVALID_ARGUMENT,
    SettingsDisagree: grpc.StatusCode.INVALID_ARGUMENT,
    LimitMet: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoRoom: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Damaged: grpc.StatusCode.DATA_LOSS,
    NotLeader: grpc.StatusCode.UNAVAILABLE,
}
"""The gRPC status of each refusal; the comments of errors.proto promise the same."""
