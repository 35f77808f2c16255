"""The commands and their options. Each command is implemented in another module, which is loaded when it is called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline._base.terminal import UsageError
from paceline.cli.commands import Command, CommandGroup, Commands, reflow
from paceline.cli.debug.debug_commands import debug
from paceline.cli.options import Coordinator, Json, Timeout, http_option, job_argument
from paceline.cli.output import one_line_errors
from paceline.cli.run_command import RUN_SETTINGS, run
from pacelinepb import __version__

_ABOUT = (
    "Paceline trains a model on several processes or machines, and training goes on when some of them die, freeze, "
    "join or leave."
)

_TRAIN, _OPERATE, _LOOK = "Train", "Operate", "Look into a run"

app = typer.Typer(
    name="paceline",
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=_ABOUT,
)

checkpoints = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Inspect checkpoints.")
_command = partial(app.command, cls=Command)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback(help=_ABOUT)
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")
    ] = False,
) -> None:
    pass


_command(context_settings=RUN_SETTINGS, rich_help_panel=_TRAIN)(run)


@_command(rich_help_panel=_OPERATE)
def coordinator(
    listen: Annotated[str, typer.Option(metavar="[HOST:]PORT", help="Where to listen.")] = "127.0.0.1:7400",
    http: Annotated[
        str | None,
        http_option(
            "Serve a page, metrics (/metrics) and jobs as JSON, with the same token and certificates; --http alone: at "
            "127.0.0.1:7401."
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.db",
            help="Keep the state of jobs in this file across restarts; or in etcd, which several coordinators share: "
            "etcd://HOST:PORT,HOST:PORT/PREFIX.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With etcd: where workers and other coordinators reach this one; default: --listen, or this host's "
            "name if that means all addresses.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE.pem", help="Serve TLS with this certificate (paceline certs).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE.key", help="The key of the certificate.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE.pem", help="Callers also need a certificate of this authority.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Callers need a token from this file: TOKEN or TOKEN JOB on each line; read again when it changes. "
            "Default: PACELINE_TOKEN_FILE, or the token in PACELINE_TOKEN; without either, callers need no token.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let other machines connect although callers need no token or certificate."),
    ] = False,
    restart_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Declare the members of a generation dead, as paceline restart does, if none of them has been "
            "connected for this long and new workers wait; default: never.",
        ),
    ] = None,
    settle_time: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Start with fewer workers than the maximum (--max) if none has joined for this long; default: 0.2.",
        ),
    ] = None,
    max_silence: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Refuse jobs with a longer PACELINE_FAILURE_TIMEOUT, and end a worker's session once it has had no "
            "connection for this long; default: 3600.",
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
            max_silence=max_silence,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            token_file=token_file,
            insecure=insecure,
            http=http,
            advertise=advertise,
        )


@_command(rich_help_panel=_OPERATE)
def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for the certificates; made if it does not exist.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name or IP address by which workers reach the coordinator; repeatable."),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=36_500, metavar="DAYS", help="Days for which the certificates are valid.")
    ] = 365,
) -> None:
    """Make certificates for a cluster: an authority, a certificate for the coordinator, and one that all members share.

    An existing authority is kept. Both certificates are made again, and the coordinator's keeps its host names.
    """
    with one_line_errors():
        from paceline.cli.certs import make_certificates

        make_certificates(directory, host or [], days)


@_command(rich_help_panel=_TRAIN)
def demo(
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, max=64, metavar="N", help="Worker processes.")] = 4,
    kill_at_step: Annotated[
        int,
        typer.Option(
            min=0, max=10_000, metavar="STEP", help="Kill a worker (SIGKILL) in the middle of this step; 0: none."
        ),
    ] = 40,
    http: Annotated[
        str | None,
        http_option("Show a page too: its URL is printed. Open it while the demo runs. --http alone: at a free port."),
    ] = None,
    same_bits: Annotated[
        bool,
        typer.Option(
            "--same-bits",
            help="Train in microbatches, then once more on one worker; compare the SHA-256 of the results.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Train on handwritten digits, kill a worker and start a new one: real data, real processes.

    The exit code is 0 only if the digits were learnt, every sample was used exactly once in every epoch, all workers
    have the same weights, and the job went on without the killed worker and admitted the new one.
    """
    with one_line_errors():
        from paceline.cli.demo import run_demo

        raise typer.Exit(run_demo(workers, kill_at_step=kill_at_step, as_json=json, http=http, same_bits=same_bits))


@_command(rich_help_panel=_OPERATE)
def status(
    coordinator: Coordinator = None,
    job: Annotated[str | None, job_argument("Show this job's members; default: all jobs.")] = None,
    named: Annotated[str | None, typer.Option("--job", metavar="JOB", help="The same as the argument.")] = None,
    live: Annotated[bool, typer.Option("--watch", "-w", help="Refresh it, until Ctrl-C.")] = False,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Show a coordinator's jobs and their members."""
    with one_line_errors():
        if live and json:
            raise UsageError("--watch and --json exclude each other")
        if live:
            from paceline.cli.watch import watch

            watch(coordinator, named if job is None else job)
        else:
            from paceline.cli.status import show_status

            show_status(coordinator, named if job is None else job, timeout, as_json=json)


@_command(rich_help_panel=_OPERATE)
def drain(
    coordinator: Coordinator = None,
    job: Annotated[str | None, job_argument(show_default=False)] = None,
    members: Annotated[
        list[str] | None, typer.Argument(metavar="RANK", help="Ranks in the current view, or member ids.")
    ] = None,
    everyone: Annotated[
        bool,
        typer.Option(
            "--all",
            help="All members: the job stops. It can be resumed from its checkpoints; "
            "without checkpoint_dir its state is lost.",
        ),
    ] = False,
    named: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Name of the job; then all arguments are ranks.", show_default=False),
    ] = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Have members leave their job after their current step; the others go on.

    For example: paceline drain digits 2 5, or paceline drain digits --all.
    """
    with one_line_errors():
        from paceline.cli.orders import drain_members

        words = [] if job is None else [job, *(members or [])]
        if named is None and not words:
            raise UsageError("name the job: paceline drain JOB RANK..., or paceline drain JOB --all")
        name, ranks = (words[0], words[1:]) if named is None else (named, words)
        drain_members(coordinator, name, ranks, timeout, everyone=everyone, as_json=json)


@_command(rich_help_panel=_OPERATE)
def restart(
    job: Annotated[str, job_argument()],
    coordinator: Coordinator = None,
    force: Annotated[bool, typer.Option("--force", help="Do so even if workers are connected and training.")] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Remove a job that is over: its keys, its generation number, and whether it was done. A later job of "
            "that name has generations above those of the checkpoints that its workers bring.",
        ),
    ] = False,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Declare the job's last workers dead, so that waiting ones can start; a job that is done starts anew.

    The coordinator cannot tell whether a silent machine is dead. If a worker that you declare dead is alive, the work
    that it has done since is lost.
    """
    with one_line_errors():
        from paceline.cli.orders import forget_job, restart_job

        if force and forget:
            raise UsageError("give --force or --forget, not both: a job whose workers are connected is not forgotten")
        if forget:
            forget_job(coordinator, job, timeout, as_json=json)
        else:
            restart_job(coordinator, job, timeout, force=force, as_json=json)


@_command(rich_help_panel=_LOOK)
def bench(
    collective: Annotated[
        str,
        typer.Argument(
            metavar="COLLECTIVE",
            help="all-reduce, reduce, reduce-scatter, broadcast, scatter, all-gather, gather, all-to-all, send-recv, "
            "barrier, or all.",
        ),
    ] = "all-reduce",
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, max=64, metavar="N", help="Worker processes.")] = 2,
    sizes: Annotated[
        str,
        typer.Option(
            metavar="BYTES[,BYTES]",
            help="Sizes of the whole array, separated by commas; rounded up to equal parts. K, M, G: KiB, MiB, GiB.",
        ),
    ] = "1KiB,64KiB,1MiB,16MiB",
    links: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[,KIND]",
            help="Kinds of links to measure, separated by commas; default: shm,tcp,grpc, or with --tune-out shm.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Use these schedules in turn, or all; default: the one that Paceline chooses, with --tune-out all.",
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(metavar="any|group", help="Where arrays come from: NumPy (any), or group.empty (group).")
    ] = "any",
    seconds: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="About how many seconds to measure for each row.")
    ] = 2.0,
    tune_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write a table of rules that chooses the fastest schedules."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure a collective between processes on this machine."""
    with one_line_errors():
        from paceline.cli.bench import plan_jobs, plan_links, run_bench

        if memory not in ("any", "group"):
            raise UsageError(f"--memory must be one of any, group, not {memory!r}")
        jobs = plan_jobs(collective, workers, sizes, schedule or ("all" if tune_out else None))
        kinds = plan_links(links or ("shm" if tune_out else "shm,tcp,grpc"), tune_out)
        raise typer.Exit(run_bench(jobs, kinds, workers, tune_out, as_json=json, memory=memory, seconds=seconds))


@_command(context_settings=RUN_SETTINGS, rich_help_panel=_TRAIN)
def replay(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script that the run had.")],
    step: Annotated[int, typer.Option(min=1, metavar="N", help="The step to compute again; it has a receipt.")],
    directory: Annotated[
        Path, typer.Option("--checkpoint", metavar="DIR", help="The run's checkpoints; the latest before N is taken.")
    ],
    receipts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's receipts; default: DIR/receipts.jsonl.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    json: Json = False,
) -> None:
    """Compute a step again on one worker, from a checkpoint, and say whether its receipt holds.

    For runs with session.steps(..., receipts=FILE). Nothing is overwritten: the script ends after step N, and saves no
    checkpoint.
    """
    with one_line_errors():
        from paceline.cli.replay_command import replay_step

        whole = ["-m", *command] if module else command
        raise typer.Exit(replay_step(whole, step=step, directory=directory, receipts=receipts, as_json=json))


@checkpoints.command(cls=Command)
def inspect(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A checkpoint's folder, or a folder of checkpoints, of which the newest is shown."
        ),
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


@_command(rich_help_panel=_OPERATE)
def version(json: Json = False) -> None:
    """Show the versions of Paceline, its protocol, Python, and the packages that it uses."""
    from paceline.cli.version import show_versions

    show_versions(as_json=json)


reflow(app)
reflow(checkpoints)
app.add_typer(debug, name="debug", rich_help_panel=_LOOK)
app.add_typer(checkpoints, name="checkpoint", rich_help_panel=_LOOK)
