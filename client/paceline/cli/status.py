"""`paceline status`: jobs and members as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.address import endpoint
from paceline.cli.admin import get_job, list_jobs
from paceline.cli.output import print_json
from pacelinepb.v1.admin_pb2 import GetJobResponse, JobPhase, JobSummary, MemberStatus

__all__ = ["job_as_dict", "jobs_table", "member_as_dict", "members_table", "show_status"]

_PHASE_STYLE = {"running": "green", "waiting": "yellow", "void": "red"}


def show_status(coordinator: str, job: str | None, timeout: float, *, as_json: bool) -> None:
    """Shows all jobs, or one with its members.

    Raises:
        UsageError: the address is malformed.
        PacelineError: no coordinator answers, or it knows no such job.
    """
    address = str(endpoint(coordinator))
    jobs = list_jobs(address, timeout) if job is None else []
    detail = None if job is None else get_job(address, job, timeout)
    if as_json:
        print_json({"jobs": [job_as_dict(each) for each in jobs]} if detail is None else _detail_as_dict(detail))
        return
    console = Console()
    if detail is not None:
        console.print(jobs_table([detail.summary]))
        console.print(members_table(detail))
        if detail.HasField("verdict"):
            console.print(Text(f"generation {detail.verdict.generation} ended: {detail.verdict.text}", style="red"))
    elif jobs:
        console.print(jobs_table(jobs))
    else:
        console.print(f"The coordinator at {address} knows no job yet.")


def job_as_dict(job: JobSummary) -> dict[str, Any]:
    """A job in the form that `--json` gives it."""
    return {
        "name": job.name,
        "phase": _phase(job),
        "generation": job.generation,
        "world_size": job.world_size,
        "waiting": job.waiting,
        "reason": job.reason,
    }


def member_as_dict(status: MemberStatus) -> dict[str, Any]:
    """A member in the form that `--json` gives it; its rank is null while it waits for a view."""
    member = status.member
    return {
        "member_id": member.member_id,
        "rank": member.rank if status.in_view else None,
        "host": member.process.host,
        "pid": member.process.pid,
        "address": member.address,
        "attached": status.attached,
        "silent_s": _silent(status),
        "operation": status.progress.operation,
    }


def _detail_as_dict(detail: GetJobResponse) -> dict[str, Any]:
    return {
        "job": job_as_dict(detail.summary),
        "min_workers": detail.settings.min_workers,
        "max_workers": detail.settings.max_workers,
        "members": [member_as_dict(each) for each in detail.members],
        "verdict": detail.verdict.text if detail.HasField("verdict") else None,
    }


def _phase(job: JobSummary) -> str:
    return JobPhase.Name(job.phase).removeprefix("JOB_PHASE_").lower()


def _silent(status: MemberStatus) -> float:
    return round(status.silent.ToNanoseconds() / 1e9, 3)


def jobs_table(jobs: list[JobSummary]) -> Table:
    """Jobs, one a row."""
    table = Table("job", "phase", "generation", "workers", "waiting", "why")
    for job in jobs:
        phase = Text(_phase(job), style=_PHASE_STYLE.get(_phase(job), ""))
        # Text, not str: a job may be called "[bold]".
        row = (str(job.generation), str(job.world_size), str(job.waiting), Text(job.reason))
        table.add_row(Text(job.name), phase, *row)
    return table


def members_table(detail: GetJobResponse) -> Table:
    """A job's members, one a row."""
    table = Table("rank", "host", "pid", "address", "heard from", "collective", "")
    for status in detail.members:
        process = status.member.process
        table.add_row(
            str(status.member.rank) if status.in_view else "-",
            Text(process.host),
            str(process.pid),
            Text(status.member.address),
            f"{_silent(status):.1f} s ago",
            str(status.progress.operation) if status.progress.operation else "-",
            "" if status.attached else Text("connection lost", style="yellow"),
        )
    return table
