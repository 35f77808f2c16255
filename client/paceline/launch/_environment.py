"""Computes a worker's environment variables, its place in a fixed world, and the cores that it may use.

Pure, except that it asks the system which cores there are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline._session.launcher_pipe import LAUNCHER_FD
from paceline.engines._variables import variables_of

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_THREAD_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_RANKS = ("PACELINE_RANK", "PACELINE_WORLD_SIZE")

LOCAL_RANK = "PACELINE_LOCAL_RANK"
"""A worker's number among the workers of its launcher, from 0. torch's LOCAL_RANK alone, without RANK, would make
libraries such as accelerate wait for a world of torchrun."""

_BOUNDS = ("PACELINE_MIN_WORKERS", "PACELINE_MAX_WORKERS")


def share_of_cores(index: int, workers: int, cores: Collection[int]) -> set[int] | None:
    """Returns the cores for one of a launcher's workers; None for all, if it is alone or workers outnumber cores.

    Otherwise the system would run a worker on the core of the one that has just woken it, where it waits for its turn;
    a small collective then takes several times longer.

    Args:
        index: number of the worker, from 0.
        workers: how many workers share the cores.
        cores: the cores to share.
    """
    if workers < 2 or workers > len(cores):
        return None
    ordered = sorted(cores)
    return set(ordered[index * len(ordered) // workers : (index + 1) * len(ordered) // workers])


def allowed_cores() -> set[int]:
    """Returns the cores that this process may use; empty if the system does not tell."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one launcher (torchrun's node) in a world of fixed size.

    Attributes:
        workers: how many workers it starts.
        world_size: how many workers all launchers start together.
        first_rank: rank of its first worker; the others' follow.
        node: its number among the launchers.
        nodes: how many launchers there are.
        master_addr: address of rank 0.
        master_port: a free port at which rank 0 can listen there.
        run_id: name of the run.
        restart: how often the world has been started again after failures.
        max_restarts: how often that may happen at most.
    """

    workers: int
    world_size: int
    first_rank: int
    node: int
    nodes: int
    master_addr: str
    master_port: int
    run_id: str
    restart: int = 0
    max_restarts: int = 0


def torch_variables(place: Place, index: int) -> dict[str, str]:
    """Returns the variables that `torchrun` sets for a worker and scripts read (those of torch.distributed.run).

    Args:
        place: the launcher's place.
        index: number of the worker among those of its launcher, from 0.
    """
    rank, world_size = str(place.first_rank + index), str(place.world_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(place.workers),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        # The launcher serves no torch store: rank 0 opens it at MASTER_PORT.
        _AGENT_STORE: "False",
    }


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What all workers of one launcher are told of their job.

    Attributes:
        coordinator: its address, "host:port".
        job: name of the job.
        min_workers: the first view forms with at least this many workers.
        max_workers: no view has more workers.
        advertise: host at which peers reach the workers, each at its own port; None if they find it themselves.
        place: the launcher's place, if ranks are known before workers join; None if the view gives the ranks.
        token: the token that this launcher made for them; None for the one in its environment, if any.
    """

    coordinator: str
    job: str
    min_workers: int
    max_workers: int
    advertise: str | None = None
    place: Place | None = None
    token: str | None = field(default=None, repr=False)


def worker_bounds(workers: int, minimum: int | None, maximum: int | None) -> tuple[int, int]:
    """Returns the job's (min_workers, max_workers) for a launcher that starts `workers` of them.

    By default the job has exactly the workers that this launcher starts. With a minimum above that, other launchers
    start the rest, and the job is full when the minimum is reached.

    Raises:
        ValueError: the numbers are invalid; the text is for the person at the command line.
    """
    if workers < 1:
        raise ValueError(f"-n must be 1 or more, not {workers}")
    low = workers if minimum is None else minimum
    if low < 1:
        raise ValueError(f"--min must be 1 or more, not {low}")
    high = max(low, workers) if maximum is None else maximum
    if high < low:
        raise ValueError(f"--max {high} is below the minimum of {low} workers")
    if high < workers:
        raise ValueError(f"-n {workers} workers do not fit into a job of at most {high} (--max)")
    return low, high


def worker_environment(
    base: Mapping[str, str],
    settings: WorkerSettings,
    launcher_fd: int | None = None,
    index: int = 0,
    compiled: Path | None = None,
) -> dict[str, str]:
    """Returns the environment of a worker: the launcher's environment, and what Paceline adds.

    `paceline.join` finds the job in it.

    Args:
        base: the launcher's environment; the user's variables there stay, except those that describe the job.
        settings: the job.
        launcher_fd: the worker's end of the pipe to `paceline run`; None for a launcher that reads none.
        index: number of the worker among those of its launcher, from 0.
        compiled: a folder for what torch compiles in this process; None for torch's own, which all processes share.
    """
    place = settings.place
    # An explicit rank in the launcher's environment would be the same in every worker.
    environment = {name: value for name, value in base.items() if name not in (*_RANKS, *_BOUNDS, LAUNCHER_FD)}
    environment |= {
        "PACELINE_COORDINATOR": settings.coordinator,
        "PACELINE_JOB": settings.job,
        LOCAL_RANK: str(index),
    }
    if launcher_fd is not None:
        environment[LAUNCHER_FD] = str(launcher_fd)
    if place is None:  # the view gives the rank
        own = (str(settings.min_workers), str(settings.max_workers))
        environment |= dict(zip(_BOUNDS, own, strict=True))
    else:  # the rank in Paceline's groups equals torch's RANK
        own = (str(place.first_rank + index), str(place.world_size))
        environment |= dict(zip(_RANKS, own, strict=True)) | torch_variables(place, index)
    if settings.token is not None:  # never in an argument, which all users of the machine can read
        environment["PACELINE_TOKEN"] = settings.token
    if settings.advertise is not None:
        environment["PACELINE_ADVERTISE"] = settings.advertise
    # NumPy's BLAS takes a thread per core in each process. With a worker per core that is cores squared threads which
    # spin against each other and against the links: 4 workers on 2 cores train several times slower.
    # torchrun leaves all cores to a worker that is alone on its node; with torchrun's flags, Paceline does so too.
    if place is None or place.workers > 1:
        for name in _THREAD_POOLS:
            environment.setdefault(name, "1")
    # A worker that is killed while it compiles leaves half a file, which the worker in its place would load.
    if compiled is not None and "TORCHINDUCTOR_CACHE_DIR" not in base:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiled / "inductor")
        environment.setdefault("TRITON_CACHE_DIR", str(compiled / "triton"))
    for name, value in variables_of(base.get("PACELINE_ENGINE", "")).items():
        environment.setdefault(name, value)
    # Lines appear when they are printed, and a worker that is killed leaves none in a buffer.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # A crash in native code shows where it was, rather than a bare SIGSEGV.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    return environment
