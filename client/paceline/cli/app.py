"""The commands and their options. Each command is implemented in another module, which is loaded when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline._version import __version__
from paceline.cli.output import one_line_errors
from paceline.cli.run_command import RUN_SETTINGS, run

__all__ = ["app"]

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Distributed training that goes on when workers die, freeze or join.",
)

checkpoints = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")
app.add_typer(checkpoints, name="checkpoint")

Json = Annotated[bool, typer.Option("--json", help="The last line of standard output is one JSON object.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Give up after this many seconds.")]
Coordinator = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_COORDINATOR",
        metavar="HOST:PORT",
        help="Address of the coordinator; default: that of your one paceline run on this machine.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="The version.")] = False,
) -> None:
    """Distributed training that goes on when workers die, freeze or join."""


@app.command()
def coordinator(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:7400",
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE.db", help="Keep generations here, so that they grow across restarts."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE.pem", help="Serve TLS with this certificate (paceline certs).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE.key", help="The key of the certificate.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE.pem", help="Callers need a certificate of this authority too.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Callers need a token of this file: TOKEN or TOKEN JOB on a line, read again when it changes. "
            "Default: PACELINE_TOKEN_FILE, or PACELINE_TOKEN for a token itself; without any, everybody may come in.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen for other machines though everybody may come in."),
    ] = False,
    restart_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Take the members of a generation for dead when none of them has been connected for so long and new "
            "workers wait, as paceline restart does; default: never.",
        ),
    ] = None,
    settle_time: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Begin with fewer workers than may come (--max) when none has come for so long; default: 0.2.",
        ),
    ] = None,
) -> None:
    """Run the coordinator in the foreground."""
    with one_line_errors():
        from paceline.cli.coordinator import run_coordinator

        run_coordinator(
            listen,
            state,
            restart_after,
            settle_time,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            token_file=token_file,
            insecure=insecure,
        )


@app.command()
def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for the certificates; made if it does not exist.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name or IP address by which workers reach the coordinator; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="Days for which the certificates are valid.")] = 365,
) -> None:
    """Make certificates for a cluster: an authority, and one each for the coordinator and for all members.

    An existing authority is kept, and both certificates are made again; that of the coordinator keeps its names.
    """
    with one_line_errors():
        from paceline.cli.certs import make_certificates

        make_certificates(directory, host or [], days)


app.command(context_settings=RUN_SETTINGS)(run)


@app.command()
def demo(
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, max=64, help="Worker processes.")] = 4,
    kill_at_step: Annotated[
        int,
        typer.Option(
            min=0, max=10_000, metavar="STEP", help="Kill a worker (SIGKILL) in the middle of this step; 0: none."
        ),
    ] = 40,
    json: Json = False,
) -> None:
    """Train on handwritten digits, kill a worker and start a new one: real data, real processes, live view.

    The exit code is 0 only if the digits were learnt, every sample was used exactly once in every epoch, and the job
    went on without the killed worker and admitted the new one.
    """
    with one_line_errors():
        from paceline.cli.demo import run_demo

        raise typer.Exit(run_demo(workers, kill_at_step=kill_at_step, as_json=json))


@app.command()
def status(
    coordinator: Coordinator = None,
    job: Annotated[str | None, typer.Argument(help="Show this job's members; default: all jobs.")] = None,
    named: Annotated[str | None, typer.Option("--job", help="The same.")] = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Show a coordinator's jobs and their members."""
    with one_line_errors():
        from paceline.cli.status import show_status

        show_status(coordinator, named if job is None else job, timeout, as_json=json)


@app.command()
def drain(
    coordinator: Coordinator = None,
    members: Annotated[
        list[str] | None, typer.Argument(metavar="MEMBER", help="Ranks in the current view, or member ids.")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="All members: the job stops, and can be resumed.")] = False,
    job: Annotated[str, typer.Option(envvar="PACELINE_JOB", help="Name of the job.")] = "default",
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Have members leave their job after their current step; the others go on."""
    with one_line_errors():
        from paceline.cli.orders import drain_members

        drain_members(coordinator, job, members or [], timeout, everyone=everyone, as_json=json)


@app.command()
def restart(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    coordinator: Coordinator = None,
    force: Annotated[bool, typer.Option("--force", help="Even if workers are connected and training.")] = False,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Declare the job's last workers dead, so that waiting ones can start.

    The coordinator cannot tell whether a silent machine is dead. If a declared worker is alive, its work since is lost.
    """
    with one_line_errors():
        from paceline.cli.orders import restart_job

        restart_job(coordinator, job, timeout, force=force, as_json=json)


@app.command()
def forget(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    coordinator: Coordinator = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Remove a job that is over from the coordinator: its keys, its generation number, and whether it was done.

    A later job of that name starts afresh, with generations above those of the checkpoints that its workers bring.
    """
    with one_line_errors():
        from paceline.cli.orders import forget_job

        forget_job(coordinator, job, timeout, as_json=json)


@app.command()
def bench(
    collective: Annotated[
        str,
        typer.Argument(
            help="all-reduce, reduce, reduce-scatter, broadcast, scatter, all-gather, gather, all-to-all, send-recv, "
            "barrier, or all."
        ),
    ] = "all-reduce",
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, max=64, help="Worker processes.")] = 2,
    sizes: Annotated[
        str, typer.Option(help="Bytes of the whole array, with commas; rounded up to equal parts.")
    ] = "1KiB,64KiB,1MiB,16MiB",
    links: Annotated[
        str | None,
        typer.Option(help="Kinds of links to measure, with commas: shm,tcp,grpc (default; --tune: shm), local."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]", help="Take these schedules, in turns; default: the one that Paceline chooses."
        ),
    ] = None,
    vs: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME]", help="Measure these too, in turns: gloo, openmpi."),
    ] = None,
    memory: Annotated[str, typer.Option(help="Where arrays come from: NumPy (any), or group.empty (group).")] = "any",
    place: Annotated[
        str,
        typer.Option(
            help="Where an all-reduce's sum goes: in (place), out (another array), usual (each one's default)."
        ),
    ] = "usual",
    seconds: Annotated[float, typer.Option(min=0.001, help="How long to measure for each row, about.")] = 2.0,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw bus bandwidth over size."),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure all schedules, and print a table of rules that chooses the fastest.")
    ] = False,
    tune_out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write that table here.")] = None,
    json: Json = False,
) -> None:
    """Measure a collective between processes on this machine."""
    with one_line_errors():
        from paceline.cli.bench.command import BenchOptions, run_bench

        asked = BenchOptions(
            collective,
            workers,
            sizes,
            links,
            schedule,
            vs=vs,
            memory=memory,
            place=place,
            seconds=seconds,
            plot=plot,
            tune=tune,
            tune_out=tune_out,
            as_json=json,
        )
        raise typer.Exit(run_bench(asked))


@app.command()
def schedules(
    collective: Annotated[str | None, typer.Argument(help="all-reduce, ...; default: the table of choices.")] = None,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", min=1, max=65536, help="World size; default: 4.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Bytes of the whole array; default: 1MiB.")] = None,
    rank: Annotated[int | None, typer.Option(help="Show the rows of this rank; default: 0. Roots are 0.")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show this schedule instead of the chosen one.")
    ] = None,
    json: Json = False,
) -> None:
    """Show which schedule a collective takes, and which rank sends what to which."""
    with one_line_errors():
        from paceline.cli.schedules_command import ScheduleOptions, show_schedules

        show_schedules(collective, ScheduleOptions(workers, size, rank, schedule), as_json=json)


@checkpoints.command()
def inspect(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A checkpoint's folder, or the folder of all checkpoints: then the newest."),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything, and compare checksums.")] = False,
    consolidate: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Save it again in OUT, with all arrays whole in one file.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a checkpoint holds: its tag, its files, its arrays."""
    with one_line_errors():
        from paceline.cli.checkpoint import inspect_checkpoint

        inspect_checkpoint(directory, verify=verify, consolidate=consolidate, as_json=json)
