"""`paceline status`: shows jobs and members, as tables for people or as JSON for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.access import coordinator_address
from paceline.cli.admin import get_job, in_order, list_jobs, seconds, stragglers
from paceline.cli.output import print_json
from pacelinepb.v1.admin_pb2 import GetJobResponse, JobPhase, JobSummary, MemberStatus

__all__ = ["job_as_dict", "jobs_table", "member_as_dict", "members_table", "show_status"]

_PHASE_STYLE = {"running": "green", "waiting": "yellow", "void": "red", "finished": "blue"}

_STANDING_STYLE = {"training": "green", "silent": "red", "leaving": "yellow", "parked": "yellow", "spare": "blue"}


def show_status(coordinator: str | None, job: str | None, timeout: float, *, as_json: bool) -> None:
    """Shows all jobs, or one with its members.

    Raises:
        UsageError: the address is malformed; or none is named, and this user serves none or several.
        PacelineError: no coordinator answers, or it knows no such job.
    """
    address = coordinator_address(coordinator)
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
    """Returns a job as `--json` prints it."""
    return {
        "name": job.name,
        "phase": _phase(job),
        "generation": job.generation,
        "world_size": job.world_size,
        "waiting": job.waiting,
        "reason": job.reason,
        "waited_s": round(seconds(job.waited), 3) if job.HasField("waited") else None,
    }


def member_as_dict(status: MemberStatus, straggler: str | None = None) -> dict[str, Any]:
    """Returns a member as `--json` prints it; its rank is null while it waits for a view.

    Args:
        status: what the coordinator reports.
        straggler: how the member holds the others up; None if it does not.
    """
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
        "step": status.progress.step,
        "standing": status.standing,
        "straggler": straggler,
    }


def _detail_as_dict(detail: GetJobResponse) -> dict[str, Any]:
    behind = stragglers(detail)
    return {
        "job": job_as_dict(detail.summary),
        "min_workers": detail.settings.min_workers,
        "max_workers": detail.settings.max_workers,
        "members": [member_as_dict(each, behind.get(each.member.member_id)) for each in in_order(detail.members)],
        "verdict": detail.verdict.text if detail.HasField("verdict") else None,
    }


def _phase(job: JobSummary) -> str:
    return JobPhase.Name(job.phase).removeprefix("JOB_PHASE_").lower()


def _silent(status: MemberStatus) -> float:
    return round(seconds(status.silent), 3)


def jobs_table(jobs: list[JobSummary]) -> Table:
    """Makes a table of jobs, one in each row."""
    table = Table("job", "phase", "generation", "workers", "waiting", "why")
    for job in jobs:
        phase = Text(_phase(job), style=_PHASE_STYLE.get(_phase(job), ""))
        # Text, not str: a job may be called "[bold]".
        row = (str(job.generation), str(job.world_size), str(job.waiting), Text(_why(job)))
        table.add_row(Text(job.name), phase, *row)
    return table


def _why(job: JobSummary) -> str:
    return f"{job.reason}; for {seconds(job.waited):.0f} s now" if job.HasField("waited") else job.reason


def members_table(detail: GetJobResponse) -> Table:
    """Makes a table of a job's members, one in each row; silent ones come first."""
    behind = stragglers(detail)
    table = Table("rank", "host", "pid", "address", "heard from", "standing", "step", "collective", "")
    for status in in_order(detail.members):
        process = status.member.process
        standing = Text(status.standing or "-", style=_STANDING_STYLE.get(status.standing, ""))
        note = behind.get(status.member.member_id, "") if status.attached else "connection lost"
        table.add_row(
            str(status.member.rank) if status.in_view else "-",
            Text(process.host),
            str(process.pid),
            Text(status.member.address),
            f"{_silent(status):.1f} s ago",
            standing,
            str(status.progress.step) if status.progress.step else "-",
            str(status.progress.operation) if status.progress.operation else "-",
            Text(note, style="yellow"),
        )
    return table
