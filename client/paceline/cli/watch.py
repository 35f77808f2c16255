"""`paceline status --watch`: draws jobs and members again and again, on a terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from rich.console import Console, RenderableType
from rich.live import Live

from paceline._base.terminal import UsageError
from paceline.cli.access import coordinator_address
from paceline.cli.admin import coordinator_of
from paceline.cli.pictures import EVENTS, job_picture, jobs_picture
from paceline.errors import CoordinatorUnreachable, OperationTimeout, PacelineError, TlsFailed
from paceline.launch._running_job import Connection
from pacelinepb.v1.admin_pb2 import GetJobResponse, JobSummary

_EVERY_S = 0.5
"""Seconds between two looks at the coordinator."""

_ANSWER_S = 2.0
"""Seconds for one answer."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The coordinator's last answer: all jobs, or one with its members (`detail`); and why there is no newer one."""

    jobs: tuple[JobSummary, ...] = ()
    detail: GetJobResponse | None = None
    trouble: str = ""


def watch(coordinator: str | None, job: str | None) -> None:
    """Draws all jobs, or one with its members, until Ctrl-C; a coordinator that is away is asked again."""
    console = Console()
    if not console.is_terminal:
        raise UsageError("--watch draws on a terminal: for a file or a program use --json")
    address = coordinator_address(coordinator) if job is None else coordinator_of(job, coordinator, _ANSWER_S)
    sight, away_since = Sight(), None
    try:
        with Connection(address) as connection, Live(console=console, auto_refresh=False) as live:
            while True:
                began = time.monotonic()
                try:
                    sight, away_since = look(connection, job), None
                except TlsFailed:
                    raise
                except (CoordinatorUnreachable, OperationTimeout):
                    away_since = began if away_since is None else away_since
                    trouble = f"no coordinator answers at {address}, for {time.monotonic() - away_since:.0f} s now; "
                    sight = replace(sight, trouble=f"{trouble}still trying (Ctrl-C ends this)")
                except PacelineError as error:
                    if type(error) is not PacelineError:  # the base class alone: there is no such job, so far
                        raise
                    sight, away_since = Sight(trouble=f"{error}; still looking (Ctrl-C ends this)"), None
                live.update(fitting(sight, console), refresh=True)
                time.sleep(max(0.0, began + _EVERY_S - time.monotonic()))
    except KeyboardInterrupt:
        return  # the usual end


def look(connection: Connection, job: str | None) -> Sight:
    """Asks for what to draw: the job that is named or the only one, with its members; otherwise all jobs."""
    if job is not None:
        return Sight(detail=connection.job(job, _ANSWER_S))
    jobs = tuple(connection.jobs(_ANSWER_S))
    return Sight(jobs, connection.job(jobs[0].name, _ANSWER_S) if len(jobs) == 1 else None)


def fitting(sight: Sight, console: Console) -> RenderableType:
    """Draws a sight in at most the rows of the terminal: fewer events, then fewer of the members that are well."""
    detail, most = sight.detail, console.height - 1
    if detail is None:
        return jobs_picture(sight.jobs, sight.trouble)
    events, members = EVENTS, len(detail.members) + len(detail.gone)
    while True:
        picture = job_picture(detail, trouble=sight.trouble, events=events, members=members)
        over = len(console.render_lines(picture, pad=False)) - most
        if over <= 0 or (events <= 1 and members <= 1):
            return picture
        if events > 1:
            events = max(1, events - over)
        else:
            members = max(1, members - over)
