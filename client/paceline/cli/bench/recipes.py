"""How to start each contender, and what must be there for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from paceline.cli.launcher import shim
from paceline.cli.output import UsageError
from paceline.config import LINKS as BETWEEN_PROCESSES

__all__ = ["BETWEEN_PROCESSES", "LINKS", "PEERS", "SOCKET", "Recipe", "check_peer", "paceline_recipe", "peer_recipe"]

LINKS = (*BETWEEN_PROCESSES, "local")
"""Kinds of links that can be asked for; "local" are those between threads of one process."""

PEERS = ("gloo", "openmpi")
"""Other implementations that can be measured beside Paceline."""

SOCKET = "{socket}"
"""In a recipe's command: the path of the conductor's socket."""

_JOB = (
    "PACELINE_ADVERTISE",
    "PACELINE_COORDINATOR",
    "PACELINE_JOB",
    "PACELINE_MAX_WORKERS",
    "PACELINE_MIN_WORKERS",
    "PACELINE_RANK",
    "PACELINE_WORLD_SIZE",
)
"""Of a job that this process may belong to; the contenders have jobs of their own."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""What `paceline run` sets for its workers; others get the same (and see `_environment`)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a contender.

    Attributes:
        name: of this contender; no two have the same.
        impl: whose implementation.
        link: which kind is asked for.
        command: of the process that is, or starts, all its ranks; SOCKET stands for the path of the conductor's.
        environment: variables.
        schedules: True if it can be told which schedule to take.
    """

    name: str
    impl: str
    link: str
    command: Sequence[str]
    environment: Mapping[str, str]
    schedules: bool = False


def paceline_recipe(link: str, world: int, memory: str) -> Recipe:
    """Paceline over one kind of link.

    Args:
        link: one of `LINKS`. Between processes a member falls back on grpc where the two cannot have that link.
        world: number of ranks.
        memory: one of `calls.MEMORIES`.
    """
    name = f"paceline over {link}"
    worker = ["-m", "paceline.cli.bench.worker", SOCKET, name, memory]
    if link == "local":
        return Recipe(name, "paceline", link, _tied([*worker, str(world)]), _environment(_ONE_THREAD), schedules=True)
    command = _tied(["-m", "paceline", "run", "-n", str(world), *worker])
    kinds = ",".join(dict.fromkeys([link, "grpc"]))
    return Recipe(name, "paceline", link, command, _environment({"PACELINE_LINKS": kinds}), schedules=True)


def peer_recipe(impl: str, world: int) -> Recipe:
    """Another implementation.

    Args:
        impl: one of `PEERS`.
        world: number of ranks.
    """
    if impl == "openmpi":
        command = _tied(["-m", "paceline.cli.bench.openmpi", SOCKET, impl, "mpirun", str(world)])
        return Recipe(impl, impl, "shm", command, _environment(_ONE_THREAD))
    # Gloo would go by the address that the host's name has, which may be none: all ranks are on this host.
    variables = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    ranks = ["-m", "paceline.cli.bench.gloo", SOCKET, impl, str(world)]
    command = _tied(["-m", "paceline", "run", "-n", str(world), *ranks])
    return Recipe(impl, impl, "tcp", command, _environment(variables))


def check_peer(impl: str) -> None:
    """Checks that another implementation is there.

    Raises:
        UsageError: there is no such one, or it is not installed; the text says how to install it.
    """
    if impl not in PEERS:
        raise UsageError(f"there is no {impl!r} to compare with: choose of {', '.join(PEERS)}")
    if impl == "gloo" and find_spec("torch") is None:
        raise UsageError("--vs gloo is a part of PyTorch, which is not there: pip install torch")
    if impl == "openmpi":
        if find_spec("mpi4py") is None:
            raise UsageError("--vs openmpi needs mpi4py, which is not there: pip install mpi4py")
        if not _has_mpirun():
            raise UsageError("--vs openmpi needs Open MPI's mpirun, which is not there: apt-get install openmpi-bin")


def _has_mpirun() -> bool:
    """MPICH's, say, has the same name and other options."""
    if shutil.which("mpirun") is None:
        return False
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "Open MPI" in said.stdout


def _tied(arguments: Sequence[str]) -> list[str]:
    """A Python process that the kernel kills when this one dies."""
    return [sys.executable, str(shim.__file__), str(os.getpid()), *arguments]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _JOB}
    return inherited | dict(more)
