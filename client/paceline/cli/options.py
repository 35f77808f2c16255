"""Options that several commands have."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Annotated, Any

import typer

_COMPLETION_S = 1.0
"""Seconds in which a coordinator must list its jobs when a shell asks for names."""


def job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns the names of jobs that begin like this, for a shell; none if no coordinator answers soon."""
    from paceline.cli.access import coordinator_address
    from paceline.cli.admin import list_jobs

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            address = coordinator_address(ctx.params.get("coordinator") or os.environ.get("PACELINE_COORDINATOR"))
            return [job.name for job in list_jobs(address, _COMPLETION_S) if job.name.startswith(incomplete)]
    except Exception:  # noqa: BLE001  # a shell would show a traceback in the middle of a line
        return []


def job_argument(about: str = "Name of the job.", **settings: Any) -> Any:
    """Returns the argument JOB, whose names a shell completes."""
    return typer.Argument(metavar="JOB", help=about, autocompletion=job_names, **settings)


Json = Annotated[
    bool, typer.Option("--json", help="Print the result as a JSON object on the last line of standard output.")
]
Timeout = Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Give up after this many seconds.")]
Coordinator = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_COORDINATOR",
        metavar="HOST:PORT",
        help="Address of the coordinator; default: the coordinator of your only paceline run on this machine.",
    ),
]


def http_option(about: str) -> Any:
    """Returns the option --http; its value is None without it, and empty if it stands alone (`commands.with_http`)."""
    return typer.Option("--http", metavar="[HOST:PORT]", help=about)
