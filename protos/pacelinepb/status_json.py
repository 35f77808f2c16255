"""Jobs, members and events as JSON: the same in `paceline status --json` and over HTTP.

Times that end in `_s` are seconds; `at` is in seconds since 1970.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import Any

from google.protobuf.duration_pb2 import Duration

from pacelinepb.v1.admin_pb2 import GetJobResponse, GoneMember, JobEvent, JobPhase, JobSummary, JobTotals, MemberStatus
from pacelinepb.v1.session_pb2 import Heartbeat

__all__ = [
    "HEARTBEATS",
    "STRAGGLER_TIMES",
    "detail_as_dict",
    "event_as_dict",
    "gone_as_dict",
    "in_order",
    "job_as_dict",
    "member_as_dict",
    "members_as_dicts",
    "number_as_json",
    "phase_name",
    "seconds",
    "seconds_left",
    "stragglers",
    "totals_as_dict",
]

HEARTBEATS = 6
"""Heartbeats in one `failure_timeout`."""

STRAGGLER_TIMES = 5
"""How many times as long as the median a straggler takes for its share: with equal shares a fifth of its speed."""


def seconds(duration: Duration) -> float:
    """Converts a duration to seconds."""
    return duration.ToNanoseconds() / 1e9


def phase_name(job: JobSummary) -> str:
    """Returns a job's phase in one lower-case word: "waiting", "running", "void" or "finished"."""
    return JobPhase.Name(job.phase).removeprefix("JOB_PHASE_").lower()


def in_order(members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Sorts silent members first, because they need attention; each part keeps its order: by rank, then by arrival."""
    return sorted(members, key=lambda status: status.attached and status.standing != "silent")


def stragglers(detail: GetJobResponse) -> dict[str, str]:
    """Finds the members that hold the others up; returns a sentence for each, by member id.

    Members send heartbeats a few times a second, at different moments, and may run thousands of operations in a second.
    So a lower operation number alone says nothing. A member is behind if others have waited inside a later operation
    for more than one heartbeat interval, and it has sent something since they entered it. A member also holds the
    others up if it takes several times as long for its share of the batch. One that is not connected is silent, not
    slow.
    """
    lanes: dict[int, list[MemberStatus]] = {}
    for status in detail.members:
        if status.in_view and status.attached:  # ranks of replicas count operations with those of the same position
            lanes.setdefault(status.member.rank % (detail.summary.replica_size or 1), []).append(status)
    interval = seconds(detail.settings.failure_timeout) / HEARTBEATS
    slow = _slow([status for there in lanes.values() for status in there if status.progress.speed > 0])
    return slow | {member_id: text for there in lanes.values() for member_id, text in _behind(there, interval).items()}


def _slow(there: Sequence[MemberStatus]) -> dict[str, str]:
    took = {status.member.member_id: status.progress.share / status.progress.speed for status in there}
    usual = median_low(took.values()) if took else 0.0
    return {
        member_id: f"takes {time / usual:.1f} times as long as others for its share of the batch"
        for member_id, time in took.items()
        if time > STRAGGLER_TIMES * usual > 0
    }


def _behind(there: Sequence[MemberStatus], interval: float) -> dict[str, str]:
    waiting = [status for status in there if status.progress.inside]
    if not waiting:
        return {}
    ahead = max(waiting, key=lambda status: status.progress.operation).progress
    entered = max(seconds(each.progress.since) for each in waiting if each.progress.operation == ahead.operation)
    if entered < interval:
        return {}
    where = f"{ahead.doing or 'operation'} {ahead.operation}"
    return {
        status.member.member_id: f"{_what_it_does(status.progress)}; others wait for it in {where}"
        for status in there
        if status.progress.operation < ahead.operation and seconds(status.silent) < entered
    }


def _what_it_does(progress: Heartbeat) -> str:
    if not progress.operation:
        return "has entered no operation yet"
    if progress.inside:
        doing = progress.doing or "operation"
        return f"has been in {doing} {progress.operation} for {seconds(progress.since):.1f} s"
    return f"has been computing for {seconds(progress.since):.1f} s"


def job_as_dict(job: JobSummary) -> dict[str, Any]:
    """Returns a job in one line."""
    return {
        "name": job.name,
        "phase": phase_name(job),
        "generation": job.generation,
        "world_size": job.world_size,
        "waiting": job.waiting,
        "reason": job.reason,
        "waited_s": round(seconds(job.waited), 3) if job.HasField("waited") else None,
        "stalled_s": round(seconds(job.stalled), 3) if job.HasField("stalled") else None,
        "stall": job.stall,
        "min_workers": job.min_workers,
        "max_workers": job.max_workers,
        "replica_size": job.replica_size or 1,
        "total": job.total or None,
        "left_s": None if (left := seconds_left(job)) is None else round(left, 1),
        "totals": totals_as_dict(job.totals),
    }


def seconds_left(job: JobSummary) -> float | None:
    """Returns the seconds until the job's last step, at its present speed; None if that is not known."""
    speed = job.totals.steps_per_second if job.phase == JobPhase.JOB_PHASE_RUNNING and not job.stall else 0.0
    return (job.total - job.totals.step) / speed if speed and job.total > job.totals.step else None


def totals_as_dict(totals: JobTotals) -> dict[str, Any]:
    """Returns what has been counted of a job."""
    return {
        "committed": totals.committed,
        "undone": totals.undone,
        "samples": totals.samples,
        "generations": totals.generations,
        "members_lost": totals.members_lost,
        "step": totals.step,
        "steps_per_second": round(totals.steps_per_second, 3),
        "goodput": round(totals.goodput, 4),
        "sent_bytes": dict(sorted(totals.sent_bytes.items())),
        "operations": totals.operations,
        "operations_per_second": round(totals.operations_per_second, 3),
        "logged": {name: number_as_json(value) for name, value in sorted(totals.logged.items())},
        "checkpoint_step": totals.checkpoint_step,
        "checkpoint_ago_s": round(seconds(totals.checkpoint_ago), 3) if totals.HasField("checkpoint_ago") else None,
    }


def number_as_json(value: float) -> float | str:
    """Returns a number, or the name of one that JSON does not have: "NaN", "Infinity" or "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def member_as_dict(status: MemberStatus, straggler: str | None = None) -> dict[str, Any]:
    """Returns a member; its rank is null while it waits for a view.

    Args:
        status: what the coordinator reports.
        straggler: how the member holds the others up; None if it does not.
    """
    member, progress = status.member, status.progress
    return {
        "member_id": member.member_id,
        "rank": member.rank if status.in_view else None,
        "host": member.process.host,
        "pid": member.process.pid,
        "address": member.address,
        "attached": status.attached,
        "silent_s": round(seconds(status.silent), 3),
        "operation": progress.operation,
        "inside": progress.inside,
        "doing": progress.doing or progress.part,
        "step": progress.step,
        "standing": status.standing,
        "straggler": straggler,
        "sent_bytes": dict(sorted(progress.sent_bytes.items())),
        "in_collectives_s": round(seconds(progress.in_collectives), 3),
        "speed": round(progress.speed, 3),
        "share": round(progress.share, 4),
        # Rounded, so that a member that does nothing new is not sent to the page again and again.
        "cpu": round(progress.cpu, 1) if progress.cpu else None,
        "memory_bytes": int(float(f"{progress.memory:.2e}")) or None,
    }


def gone_as_dict(gone: GoneMember) -> dict[str, Any]:
    """Returns a member that has ended; its rank is null if it had no seat."""
    member = gone.member
    return {
        "member_id": member.member_id,
        "rank": member.rank if gone.in_view else None,
        "host": member.process.host,
        "pid": member.process.pid,
        "ago_s": round(seconds(gone.ago), 3),
        "how": gone.how,
        "output": gone.output,
    }


def event_as_dict(event: JobEvent) -> dict[str, Any]:
    """Returns an event."""
    return {
        "number": event.number,
        "at": round(event.at.ToNanoseconds() / 1e9, 3),
        "job": event.job,
        "kind": event.kind,
        "generation": event.generation,
        "text": event.text,
    }


def members_as_dicts(detail: GetJobResponse) -> Iterator[dict[str, Any]]:
    """Yields a job's members: silent ones first, each part by rank, then by arrival."""
    behind = stragglers(detail)
    for status in in_order(detail.members):
        yield member_as_dict(status, behind.get(status.member.member_id))


def detail_as_dict(detail: GetJobResponse, members: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Returns a job with its members, those that have ended lately, its verdict and its last events.

    Args:
        detail: what the coordinator reports.
        members: its members, if they are converted already.
    """
    return {
        "job": job_as_dict(detail.summary),
        "min_workers": detail.settings.min_workers,
        "max_workers": detail.settings.max_workers,
        "members": list(members_as_dicts(detail) if members is None else members),
        "gone": [gone_as_dict(each) for each in detail.gone],
        "verdict": detail.verdict.text if detail.HasField("verdict") else None,
        "events": [event_as_dict(each) for each in detail.events],
    }
