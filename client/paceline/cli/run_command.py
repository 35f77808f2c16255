"""Defines the options of `paceline run`: Paceline's, and torchrun's in a separate panel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.output import UsageError, one_line_errors

__all__ = ["RUN_SETTINGS", "run"]

RUN_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,  # options after SCRIPT belong to the script
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --nproc_per_node, as torchrun takes it
}

_OUTPUT = "Workers' lines"
_TORCHRUN = "torchrun's flags: one world after another, with RANK, WORLD_SIZE and MASTER_* set"


def _torchrun(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=_TORCHRUN, show_default=False)


def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="What each worker runs.")],
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers to start here.")] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program, not a Python script.")] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_COORDINATOR", metavar="HOST:PORT", help="Address of the coordinator; default: embed one."
        ),
    ] = None,
    job: Annotated[str, typer.Option(envvar="PACELINE_JOB", help="Name of the job.")] = "default",
    minimum: Annotated[
        int | None,
        typer.Option(
            "--min", envvar="PACELINE_MIN_WORKERS", help="Start with this many workers, from all shells; default: -n."
        ),
    ] = None,
    maximum: Annotated[
        int | None,
        typer.Option(
            "--max", envvar="PACELINE_MAX_WORKERS", help="Never have more than this; default: the larger of -n, --min."
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(metavar="N", help="Start each worker that fails again, at most this often.")
    ] = 0,
    spares: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Keep N processes with the script's imports done, to replace workers at once; default: 1 with "
            "--restarts, else 0.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            "--local-addr",
            envvar="PACELINE_ADVERTISE",
            metavar="HOST",
            help="Where other hosts reach these workers; default: the address of the route to the coordinator.",
        ),
    ] = None,
    bind: Annotated[
        bool, typer.Option("--bind/--no-bind", help="Bind each worker to its share of the cores, if there are enough.")
    ] = True,
    log_dir: Annotated[
        Path | None, typer.Option(rich_help_panel=_OUTPUT, help="Keep each worker's lines in a file here.")
    ] = None,
    redirects: Annotated[
        str | None,
        typer.Option(
            "-r",
            "--redirects",
            rich_help_panel=_OUTPUT,
            metavar="STREAMS",
            help="Keep lines in files, and hide those of 1 (stdout), 2 (stderr), 3 (both); 0:3,1:2 by worker.",
        ),
    ] = None,
    tee: Annotated[
        str | None,
        typer.Option(
            "-t", "--tee", rich_help_panel=_OUTPUT, metavar="STREAMS", help="Keep lines in files, and show these too."
        ),
    ] = None,
    nnodes: Annotated[
        str | None, _torchrun("--nnodes", metavar="N|MIN:MAX", help="Launchers that make up a world; default: 1.")
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        _torchrun("--nproc-per-node", metavar="N|cpu|auto", help="Workers to start here; default: 1."),
    ] = None,
    node_rank: Annotated[
        int | None, _torchrun("--node-rank", metavar="N", help="This launcher's number; default: assigned.")
    ] = None,
    master_addr: Annotated[
        str | None,
        _torchrun("--master-addr", metavar="HOST", help="Where other ranks reach rank 0; default: detected."),
    ] = None,
    master_port: Annotated[
        int | None, _torchrun("--master-port", metavar="PORT", help="Where rank 0 listens; default: a free port.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        _torchrun(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Where launchers meet: the first one on that host serves the coordinator. Default: --coordinator, "
            "or --master-addr at the port after --master-port (29500).",
        ),
    ] = None,
    rdzv_backend: Annotated[
        str | None, _torchrun("--rdzv-backend", metavar="NAME", help="c10d or static; either is a coordinator here.")
    ] = None,
    rdzv_id: Annotated[str | None, _torchrun("--rdzv-id", metavar="NAME", help="The same as --job.")] = None,
    max_restarts: Annotated[
        int | None,
        _torchrun("--max-restarts", metavar="N", help="Start all workers again when one fails, at most this often."),
    ] = None,
    standalone: Annotated[bool, _torchrun("--standalone", help="Run with this launcher alone.")] = False,
    insecure: Annotated[
        bool,
        _torchrun(
            "--insecure", help="Allow every process that reaches the port to join. Default: only with a token or TLS."
        ),
    ] = False,
) -> None:
    """Start workers that run a script, and wait for them.

    With --min below --max, or with --restarts, the others go on when a worker fails.

    With torchrun's flags, all workers end when one fails or a node joins or leaves, and a new world starts.
    """
    with one_line_errors():
        from paceline.cli.run import run_nodes, run_workers
        from paceline.cli.torchrun import Flags

        flags = Flags(
            nnodes=nnodes,
            nproc_per_node=nproc_per_node,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            rdzv_backend=rdzv_backend,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            standalone=standalone,
            max_restarts=max_restarts,
        )
        if no_python and module:
            raise UsageError("--no-python and --module exclude each other")
        whole = ["--", *command] if no_python else ["-m", *command] if module else command
        if flags.given:
            _refuse_both(context, flags.given[0])
            code = run_nodes(
                whole,
                flags,
                coordinator=coordinator,
                job=job,
                log_dir=log_dir,
                advertise=advertise,
                bind=bind,
                redirects=redirects,
                tee=tee,
                insecure=insecure,
            )
        else:
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
            )
        raise typer.Exit(code)


_OWN: dict[str, tuple[str, str | None]] = {
    "workers": ("-n", "--nproc-per-node"),
    "minimum": ("--min", "--nnodes MIN:MAX"),
    "maximum": ("--max", "--nnodes MIN:MAX"),
    "restarts": ("--restarts", "--max-restarts"),
    "spares": ("--spares", None),
}
"""Paceline's options, and the flag of torchrun that replaces each; None if there is none."""


def _refuse_both(context: typer.Context, flag: str) -> None:
    """Refuses options of both kinds: with Paceline's, workers go on without a failed one; with torchrun's, all end."""
    for name, (own, instead) in _OWN.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            advice = f"write {instead}" if instead else "leave it out"
            raise UsageError(f"{own} does not go with torchrun's {flag}: {advice}, or leave torchrun's flags out")
