"""The commands under `paceline debug`, and their options."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.commands import Command, CommandGroup, reflow
from paceline.cli.options import Coordinator, Json, Timeout, job_argument
from paceline.cli.output import one_line_errors

debug = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Find out what the ranks of a job are doing.")
_command = partial(debug.command, cls=Command)

_Dumps = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="DIR", help="Read the dumps in this folder; default: ask the members, if there are any."
    ),
]


@_command()
def flight(
    job: Annotated[str | None, job_argument()] = None,
    coordinator: Coordinator = None,
    directory: _Dumps = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Show which ranks are stuck, in which operation, and since when: compares the last operations of all ranks.

    Members answer while they train. For a job that is over, the command reads the dumps on this machine.
    """
    with one_line_errors():
        from paceline.cli.debug.flight_command import show_flight

        show_flight(job, coordinator, directory, timeout, as_json=json)


@_command()
def stacks(
    job: Annotated[str, job_argument()],
    coordinator: Coordinator = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show the threads of Paceline and grpc too, and all frames.")
    ] = False,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Show where the code of each rank stands, also of ranks that hang with the GIL held.

    Needs no debugger and no special rights: workers write their own stacks. Training goes on meanwhile.
    """
    with one_line_errors():
        from paceline.cli.debug.stacks_command import show_stacks

        show_stacks(job, coordinator, timeout, everything=everything, as_json=json)


@_command()
def output(
    job: Annotated[str, job_argument()],
    ranks: Annotated[
        list[str] | None, typer.Argument(metavar="[RANK]...", help="Ranks or member ids; default: all.")
    ] = None,
    coordinator: Coordinator = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Show the last lines that each worker of a paceline run has printed, without a login on its host.

    Lines of code in C and of worker processes that have ended are there, too. Of each worker they are the last 50.
    """
    with one_line_errors():
        from paceline.cli.debug.output_command import show_output

        show_output(job, ranks or [], coordinator, timeout, as_json=json)


@_command()
def trace(
    job: Annotated[str | None, job_argument()] = None,
    coordinator: Coordinator = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.json", help="Write the trace here.")] = Path(
        "trace.json"
    ),
    directory: _Dumps = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Write the last operations and steps of all ranks as a trace that ui.perfetto.dev and chrome://tracing open.

    The hosts' clocks are aligned by the times of request and answer; the file says how exactly.
    """
    with one_line_errors():
        from paceline.cli.debug.trace_command import write_trace

        write_trace(job, coordinator, directory, timeout, out, as_json=json)


@_command()
def schedules(
    collective: Annotated[
        str | None, typer.Argument(metavar="COLLECTIVE", help="all-reduce, ...; default: the table of choices.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", min=1, max=65536, metavar="N", help="World size; default: 4.")
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Hosts on which the ranks are, in order and evenly; default: unknown."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Bytes of the whole array, such as 64K or 8MiB; default: 1MiB.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(metavar="RANK", help="Show the rows of this rank; default: 0. A root is always rank 0."),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show this schedule instead of the chosen one.")
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, max=65536, metavar="V", help="Show how the V microbatches of a step are summed in a tree."),
    ] = None,
    json: Json = False,
) -> None:
    """Show which schedule a collective uses, and what a rank sends and receives in each step."""
    with one_line_errors():
        from paceline.cli.schedules_command import ScheduleOptions, show_schedules

        show_schedules(collective, ScheduleOptions(workers, size, rank, schedule, hosts, microbatches), as_json=json)


reflow(debug)
