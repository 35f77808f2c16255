"""`paceline status`: shows jobs and members, as tables for people or as JSON for programs."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.access import coordinator_address
from paceline.cli.admin import coordinator_of, get_job, list_all
from paceline.cli.output import print_json
from paceline.cli.pictures import job_picture, phase_text, why_text
from paceline.errors import PacelineError
from paceline.launch._own_coordinator import own_addresses
from pacelinepb.status_json import detail_as_dict, job_as_dict
from pacelinepb.v1.admin_pb2 import JobSummary, ListJobsResponse

_WIDE = 200
"""Columns where the output is no terminal, so that `grep` finds a value beside its name."""


def show_status(coordinator: str | None, job: str | None, timeout: float, *, as_json: bool) -> None:
    """Shows all jobs, or one with its members; without a coordinator the jobs of all that this user serves."""
    several = own_addresses() if coordinator is None and job is None else []
    if len(several) > 1 and not as_json:
        for address in several:
            print(f"coordinator {address}:")
            try:
                show_status(address, None, timeout, as_json=False)
            except PacelineError as error:  # it has just ended, or is frozen
                print(error)
        return
    address = coordinator_address(coordinator) if job is None else coordinator_of(job, coordinator, timeout)
    listed = list_all(address, timeout) if job is None else ListJobsResponse()
    jobs = list(listed.jobs)
    detail = None if job is None else get_job(address, job, timeout)
    if as_json:
        leader = listed.leader if detail is None else detail.leader
        shown: dict[str, Any] = (
            {"jobs": [job_as_dict(each) for each in jobs]} if detail is None else detail_as_dict(detail)
        )
        if leader.epoch:
            shown["leader"] = {"address": leader.address, "epoch": leader.epoch}
        print_json(shown)
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    if (leader := listed.leader if detail is None else detail.leader).epoch:
        console.print(Text(f"The coordinator at {leader.address} leads, in epoch {leader.epoch}."))
    if detail is not None:
        console.print(job_picture(detail, events=0))
    elif jobs:
        console.print(jobs_table(jobs))
    else:
        console.print(f"The coordinator at {address} knows no job yet.")


def jobs_table(jobs: list[JobSummary]) -> Table:
    """Makes a table of jobs, one in each row."""
    table = Table("job", "phase", "generation", "workers", "waiting", "why")
    for job in jobs:
        # Text, not str: a job may be called "[bold]".
        row = (str(job.generation), str(job.world_size), str(job.waiting), Text(why_text(job)))
        table.add_row(Text(job.name), phase_text(job), *row)
    return _whole(table)


def _whole(table: Table) -> Table:
    """Makes long words of a table go on in the next row, instead of being cut."""
    for column in table.columns:
        column.overflow = "fold"
    return table
