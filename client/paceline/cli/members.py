"""What a coordinator's answer says about members: how they are called, and who holds the others up. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from pacelinepb.v1.admin_pb2 import GetJobResponse, MemberStatus
from pacelinepb.v1.session_pb2 import JobSettings

__all__ = ["in_order", "is_heard", "label", "seconds", "stragglers"]

_HEARTBEATS = 6
"""In a `failure_timeout`."""


def seconds(duration: Duration) -> float:
    """A duration in seconds."""
    return duration.ToNanoseconds() / 1e9


def label(status: MemberStatus) -> str:
    """A member in a sentence."""
    process = status.member.process
    name = f"rank {status.member.rank}" if status.in_view else f"member {status.member.member_id}"
    return f"{name} ({process.host}, pid {process.pid})"


def is_heard(status: MemberStatus, settings: JobSettings) -> bool:
    """True if it is connected, and not only because its host has not said that it is gone."""
    return status.attached and seconds(status.silent) < seconds(settings.failure_timeout)


def in_order(members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Those that are silent first, whom somebody must look after; each part as it came: by rank, then by arrival."""
    return sorted(members, key=lambda status: status.attached and status.standing != "silent")


def stragglers(detail: GetJobResponse) -> dict[str, str]:
    """Who holds the others up: a sentence for each, by member id.

    Heartbeats come some times a second and are of different moments, while there may be thousands of operations in a
    second: a lower number alone says nothing. A member is behind if others have been waiting inside a later operation
    for more than a heartbeat, and it has spoken since they entered it. Somebody must be there to hold up: whoever is
    not connected is silent, not slow.
    """
    there = [status for status in detail.members if status.in_view and status.attached]
    interval = seconds(detail.settings.failure_timeout) / _HEARTBEATS
    waiting = [status for status in there if status.progress.inside]
    if not waiting:
        return {}
    ahead = max(status.progress.operation for status in waiting)
    entered = max(seconds(status.progress.since) for status in waiting if status.progress.operation == ahead)
    if entered < interval:
        return {}
    return {
        status.member.member_id: _sentence(status, ahead)
        for status in there
        if status.progress.operation < ahead and seconds(status.silent) < entered
    }


def _sentence(status: MemberStatus, ahead: int) -> str:
    progress = status.progress
    if not progress.operation:
        return f"straggler: in no operation yet, others are in {ahead}"
    where = "in" if progress.inside else "out of"
    return f"straggler: {seconds(progress.since):.1f} s {where} operation {progress.operation}, others are in {ahead}"
