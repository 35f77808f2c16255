"""Defines the options of `paceline run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline._base.terminal import UsageError, printable, say
from paceline.cli.options import http_option
from paceline.cli.output import one_line_errors

RUN_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,  # options after SCRIPT belong to the script
}

_DRAIN_BEFORE_S = 60.0
"""A step and a checkpoint fit in."""

_OUTPUT = "Workers' lines"


def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="What each worker runs.")],
    workers: Annotated[int, typer.Option("-n", "--workers", metavar="N", help="Workers to start here.")] = 1,
    replica_size: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Each K workers in a row are the ranks of one replica, which share a copy of the model and a world of "
            "torch.distributed, and restart as a whole; --min, --max and --restarts count replicas then.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program, not a Python script.")] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_COORDINATOR", metavar="HOST:PORT", help="Address of the coordinator; default: embed one."
        ),
    ] = None,
    job: Annotated[str, typer.Option(envvar="PACELINE_JOB", metavar="JOB", help="Name of the job.")] = "default",
    minimum: Annotated[
        int | None,
        typer.Option(
            "--min",
            envvar="PACELINE_MIN_WORKERS",
            metavar="N",
            help="Start when this many workers have joined, from all launchers; default: -n.",
        ),
    ] = None,
    maximum: Annotated[
        int | None,
        typer.Option(
            "--max",
            envvar="PACELINE_MAX_WORKERS",
            metavar="N",
            help="Never have more workers than this; default: the larger of -n, --min.",
        ),
    ] = None,
    restarts: Annotated[int, typer.Option(metavar="N", help="Restart each worker that fails, at most this often.")] = 0,
    spares: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Keep N spare processes that have done the script's imports, to replace failed workers at once; "
            "default: 1 with --restarts, else 0.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            envvar="PACELINE_ADVERTISE",
            metavar="HOST",
            help="Where other hosts reach these workers; default: this host's address on the route to the coordinator.",
        ),
    ] = None,
    bind: Annotated[
        bool, typer.Option("--bind/--no-bind", help="Bind each worker to its share of the cores, if there are enough.")
    ] = True,
    engine: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_ENGINE",
            metavar="NAME",
            help="What carries the gradients of DDP: links (default), gloo, nccl on GPUs, or a plug-in's, such as mpi.",
        ),
    ] = None,
    notice: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_NOTICE",
            metavar="CLOUDS",
            help="Let the workers leave when the cloud announces that it will reclaim this spot machine: aws, gcp, "
            "azure, or a plug-in's name; several separated by commas.",
        ),
    ] = None,
    drain_before: Annotated[
        float,
        typer.Option(
            envvar="PACELINE_DRAIN_BEFORE",
            metavar="SECONDS",
            help="Let the workers leave this long before the end of the scheduler's job, such as Slurm's; 0 for never.",
        ),
    ] = _DRAIN_BEFORE_S,
    drained_code: Annotated[
        int,
        typer.Option(
            metavar="CODE",
            help="Exit code if the workers were told to leave (SIGTERM, --notice, --drain-before) and all left in good "
            "order, so that a batch script can requeue itself.",
        ),
    ] = 0,
    drain_stragglers: Annotated[
        bool,
        typer.Option(
            "--drain-stragglers",
            help="Let a worker leave that stays far slower than the median, unless fewer than --min would be left; for "
            "scripts with session.steps(..., balance=True).",
        ),
    ] = False,
    http: Annotated[
        str | None,
        http_option(
            "Serve a page that shows the job; its URL is printed. On a terminal it stays after the job, until you "
            "press Enter. --http alone: at a free port of loopback."
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", rich_help_panel=_OUTPUT, help="Keep each worker's lines in a file here."),
    ] = None,
    redirects: Annotated[
        str | None,
        typer.Option(
            "-r",
            "--redirects",
            rich_help_panel=_OUTPUT,
            metavar="STREAMS",
            help="Keep lines in files, and hide those of 1 (stdout), 2 (stderr) or 3 (both); by worker: 0:3,1:2.",
        ),
    ] = None,
    tee: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--tee",
            rich_help_panel=_OUTPUT,
            metavar="STREAMS",
            help="Keep lines in files, and show these even with -r.",
        ),
    ] = None,
) -> None:
    """Start workers that run a script, and wait for them.

    With --min below --max, or with --restarts, the others go on when a worker fails.

    As a task of Slurm's srun, -n, --job, --min, --max and the coordinator follow from Slurm's variables.
    """
    with one_line_errors():
        from paceline.cli.access import endpoint
        from paceline.cli.hosts import find_host, find_notices
        from paceline.cli.run import engine_for_workers, launcher_of, run_workers, variable_for_workers

        if no_python and module:
            raise UsageError("give --no-python or --module, not both")
        whole = ["--", *command] if no_python else ["-m", *command] if module else command
        page = None if http is None else str(endpoint(http or "127.0.0.1:0", default_port=0))
        context.with_resource(engine_for_workers(engine))
        if drain_stragglers:
            context.with_resource(variable_for_workers("PACELINE_DRAIN_STRAGGLERS", "1"))
        if (launch := launcher_of(engine)) is not None:
            _refuse_with_launcher(context, str(engine))
            _say_that_notices_are_ignored(notice, f"--engine {engine}")
            try:
                launch(whole, workers=workers, minimum=minimum, coordinator=coordinator, job=job)
            except ValueError as error:
                raise UsageError(str(error)) from None
            return
        host, notices = find_host(), find_notices(notice)
        if not drain_before >= 0:
            raise UsageError(f"--drain-before must be 0 or more, not {drain_before:g}")
        if host is not None:
            workers = host.workers if host.workers and _is_default(context, "workers") else workers
            job = host.job if host.job and _is_default(context, "job") else job
        code = run_workers(
            whole,
            workers=workers,
            coordinator=coordinator,
            job=job,
            minimum=minimum,
            maximum=maximum,
            restarts=restarts,
            spares=spares,
            log_dir=log_dir,
            advertise=advertise,
            bind=bind,
            redirects=redirects,
            tee=tee,
            http=page,
            host=host,
            notices=notices,
            drain_before=drain_before,
            drained_code=drained_code,
            replica_size=replica_size,
        )
        raise typer.Exit(code)


_PASSED_ON = {"workers", "minimum", "coordinator", "job", "engine", "module", "command"}
"""The options that an engine's own launcher gets, such as mpirun."""


def _refuse_with_launcher(context: typer.Context, engine: str) -> None:
    """Refuses options that would have no effect: the engine's own launcher starts workers and shows their lines."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in _PASSED_ON and _was_typed(context, name):
            raise UsageError(
                f"{parameter.opts[-1]} does not go with --engine {engine}, whose workers another launcher starts: "
                "leave it out"
            )


def _say_that_notices_are_ignored(notice: str | None, reason: str) -> None:
    """Says that PACELINE_NOTICE has no effect, if it is set; --notice was refused before."""
    if notice:
        say(f"PACELINE_NOTICE={printable(notice)} has no effect with {reason}: no cloud is asked")


def _is_default(context: typer.Context, name: str) -> bool:
    """True if an option was given neither on the command line nor by a variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT"


def _was_typed(context: typer.Context, name: str) -> bool:
    """True if an option was given on the command line, and is neither a default nor from the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
