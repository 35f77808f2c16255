"""The refusals of the protocol. The coordinator turns each into a gRPC status, and has refusals of its own."""

from __future__ import annotations

from typing import ClassVar

from pacelinepb.v1.errors_pb2 import ErrorReason


class Refused(Exception):
    """A request that is not carried out; the text says why, for people, and `reason` for the other side."""

    reason: ClassVar[ErrorReason.ValueType]


class BadRequest(Refused):
    """The request itself is wrong; sending it again does not help."""

    reason = ErrorReason.ERROR_REASON_BAD_REQUEST


class SessionEnded(Refused):
    """The session has ended, was never there, or the token does not prove it."""

    reason = ErrorReason.ERROR_REASON_SESSION_ENDED


class ReplicaLost(Refused):
    """A rank of the member's replica has ended, so that the replica is of no use any more; the text names it."""

    reason = ErrorReason.ERROR_REASON_REPLICA_LOST


class Barred(Refused):
    """The job has parted with the worker over breaches of the protocol, and does not take it any more."""

    reason = ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL


class RankTaken(Refused):
    """Two live members claim one rank; the text names both hosts."""

    reason = ErrorReason.ERROR_REASON_RANK_TAKEN


class InvalidRank(Refused):
    """The rank is outside the world."""

    reason = ErrorReason.ERROR_REASON_INVALID_RANK


class InvalidWorldSize(Refused):
    """The world size is impossible."""

    reason = ErrorReason.ERROR_REASON_INVALID_WORLD_SIZE


class SettingsDisagree(Refused):
    """The member disagrees with its job; the text names the setting and both values."""

    reason = ErrorReason.ERROR_REASON_SETTINGS_DISAGREE


class VersionMismatch(Refused):
    """Two programs have no version of the protocol in common; the text says which versions each speaks."""

    reason = ErrorReason.ERROR_REASON_VERSION
