"""The commands and their options. Each command is implemented in another module, which is loaded when it is called."""

from __future__ import annotations

from functools import cache
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
import typer.main

from paceline._base.terminal import UsageError
from paceline.cli.output import one_line_errors
from paceline.cli.run_command import RUN_SETTINGS, run
from pacelinepb import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_ABOUT = (
    "Paceline trains a model on several processes or machines, and training goes on when some of them die, freeze, "
    "join or leave."
)


@cache
def _plugged_in() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # most commands need no plug-in

    return {entry.name: entry for entry in entry_points(group="paceline.commands")}


class _Commands(typer.core.TyperGroup):
    """Paceline's commands, and those of plug-ins: entry points in "paceline.commands", each naming a `typer.Typer`.

    Plug-ins are looked for only if a command is not Paceline's own, or if all are listed.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in _plugged_in() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in _plugged_in():
            return own
        return _command_of(_plugged_in()[cmd_name])


def _command_of(point: EntryPoint) -> Any:
    """Returns a plug-in's command; if it cannot be loaded, one whose help and error say why."""
    from rich.markup import escape

    from paceline.cli.plug_ins import errors_of

    try:
        with errors_of(point):
            command = point.load()
            _reflow(command)
            return typer.main.get_command(command)
    except UsageError as error:
        why = str(error)
    broken = typer.Typer()

    @broken.command(help=escape(why), context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def fail() -> None:
        with one_line_errors():
            raise UsageError(why)

    return typer.main.get_command(broken)


app = typer.Typer(
    name="paceline",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=_ABOUT,
)

checkpoints = typer.Typer(no_args_is_help=True, help="Inspect checkpoints.")
app.add_typer(checkpoints, name="checkpoint")

Json = Annotated[
    bool, typer.Option("--json", help="Print the result as a JSON object on the last line of standard output.")
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Give up after this many seconds.")]
Coordinator = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_COORDINATOR",
        metavar="HOST:PORT",
        help="Address of the coordinator; default: that of your only paceline run on this machine.",
    ),
]


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


@app.command()
def coordinator(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:7400",
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve a page, metrics (/metrics) and jobs as JSON here, with the same token and certificates; "
            "default: nowhere.",
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
    """Make certificates for a cluster: an authority, a certificate for the coordinator, and one that all members share.

    An existing authority is kept. Both certificates are made again, and the coordinator's keeps its host names.
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
    http: Annotated[
        bool, typer.Option("--http", help="Show a page too: its URL is printed. Open it while the demo runs.")
    ] = False,
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


@app.command()
def status(
    coordinator: Coordinator = None,
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Show this job's members; default: all jobs.")
    ] = None,
    named: Annotated[str | None, typer.Option("--job", help="The same as the argument.")] = None,
    live: Annotated[bool, typer.Option("--watch", "-w", help="Draw it again and again, until Ctrl-C.")] = False,
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


@app.command()
def drain(
    coordinator: Coordinator = None,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Name of the job.", show_default=False)] = None,
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
        str | None, typer.Option("--job", help="Name of the job; then all arguments are ranks.", show_default=False)
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


@app.command()
def restart(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")],
    coordinator: Coordinator = None,
    force: Annotated[bool, typer.Option("--force", help="Do so even if workers are connected and training.")] = False,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Declare the job's last workers dead, so that waiting ones can start; a job that is done starts anew.

    The coordinator cannot tell whether a silent machine is dead. If a worker that you declare dead is alive, the work
    that it has done since is lost.
    """
    with one_line_errors():
        from paceline.cli.orders import restart_job

        restart_job(coordinator, job, timeout, force=force, as_json=json)


@app.command()
def forget(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")],
    coordinator: Coordinator = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Remove a job that is over from the coordinator: its keys, its generation number, and whether it was done.

    To train a job anew that is done, paceline restart JOB is enough.
    A later job of that name starts afresh, with generations above those of the checkpoints that its workers bring.
    """
    with one_line_errors():
        from paceline.cli.orders import forget_job

        forget_job(coordinator, job, timeout, as_json=json)


@app.command()
def flight(
    job: Annotated[str | None, typer.Argument(help="Name of the job.")] = None,
    coordinator: Coordinator = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Read the dumps in this folder; default: ask the members, if there are any."
        ),
    ] = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Say who is stuck in what, and since when: compares the last operations of all ranks.

    Members are asked beside their training. Of a job that is over, the dumps on this machine are read.
    """
    with one_line_errors():
        from paceline.cli.debug.flight_command import show_flight

        show_flight(job, coordinator, directory, timeout, as_json=json)


@app.command()
def stacks(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    coordinator: Coordinator = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show the threads of Paceline and grpc too, and all frames.")
    ] = False,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Show where the code of each rank stands, also of ranks that hang with the GIL held.

    Needs no debugger and no rights: workers write their own stacks. Training goes on meanwhile.
    """
    with one_line_errors():
        from paceline.cli.debug.stacks_command import show_stacks

        show_stacks(job, coordinator, timeout, everything=everything, as_json=json)


@app.command()
def trace(
    job: Annotated[str | None, typer.Argument(help="Name of the job.")] = None,
    coordinator: Coordinator = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.json", help="Write the trace here.")] = Path(
        "trace.json"
    ),
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Read the dumps in this folder; default: ask the members, if there are any."
        ),
    ] = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Write the last operations and steps of all ranks as a trace that ui.perfetto.dev and chrome://tracing open.

    Clocks of hosts are aligned by the times of the question itself; the file says how exact that is.
    """
    with one_line_errors():
        from paceline.cli.debug.trace_command import write_trace

        write_trace(job, coordinator, directory, timeout, out, as_json=json)


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
        str,
        typer.Option(
            help="Sizes of the whole array, separated by commas; rounded up to equal parts. K, M, G: KiB, MiB, GiB."
        ),
    ] = "1KiB,64KiB,1MiB,16MiB",
    links: Annotated[
        str | None,
        typer.Option(
            help="Kinds of links to measure, separated by commas; default: shm,tcp,grpc, or with --tune-out shm."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Use these schedules in turn, or all; default: the one that Paceline chooses, with --tune-out all.",
        ),
    ] = None,
    memory: Annotated[str, typer.Option(help="Where arrays come from: NumPy (any), or group.empty (group).")] = "any",
    seconds: Annotated[float, typer.Option(min=0.001, help="About how many seconds to measure for each row.")] = 2.0,
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


@app.command()
def schedules(
    collective: Annotated[str | None, typer.Argument(help="all-reduce, ...; default: the table of choices.")] = None,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", min=1, max=65536, help="World size; default: 4.")
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Hosts on which the ranks are, in order and evenly; default: unknown."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Bytes of the whole array, such as 64K or 8MiB; default: 1MiB.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Show the rows of this rank; default: 0. A root is always rank 0.")
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


@app.command(context_settings=RUN_SETTINGS)
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

    For runs with session.steps(..., receipts=FILE). Nothing is written over: the script ends after step N, and saves no
    checkpoint.
    """
    with one_line_errors():
        from paceline.cli.replay_command import replay_step

        whole = ["-m", *command] if module else command
        raise typer.Exit(replay_step(whole, step=step, directory=directory, receipts=receipts, as_json=json))


@checkpoints.command()
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


def _reflow(commands: typer.Typer) -> None:
    """Joins the lines of each paragraph of the help texts: rich breaks lines where the terminal ends."""
    for command in commands.registered_commands:
        text = command.help or getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


_reflow(app)
_reflow(checkpoints)
