"""What a worker finds when it starts: its environment, its place in a fixed world, and the cores it may use.

Pure, but for asking the system which cores there are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from paceline._session.launcher_pipe import LAUNCHER_FD

__all__ = [
    "Place",
    "WorkerSettings",
    "allowed_cores",
    "share_of_cores",
    "torch_variables",
    "worker_bounds",
    "worker_environment",
]

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_THREAD_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_RANKS = ("PACELINE_RANK", "PACELINE_WORLD_SIZE")

_BOUNDS = ("PACELINE_MIN_WORKERS", "PACELINE_MAX_WORKERS")


def share_of_cores(index: int, workers: int, cores: Collection[int]) -> set[int] | None:
    """The cores for one of a launcher's workers; None for all of them, where workers outnumber cores or are alone.

    A neighbour's wake-up would else be run on the core that has woken it, where it waits for its turn: a small
    collective takes several times longer then.

    Args:
        index: of the worker, from 0.
        workers: how many share the cores.
        cores: those that there are.
    """
    if workers < 2 or workers > len(cores):
        return None
    ordered = sorted(cores)
    return set(ordered[index * len(ordered) // workers : (index + 1) * len(ordered) // workers])


def allowed_cores() -> set[int]:
    """The cores that this process may use; none known where the system does not tell."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


@dataclass(frozen=True, slots=True)
class Place:
    """One launcher (torchrun's node) among those of a world of fixed size.

    Attributes:
        workers: how many it starts.
        world_size: how many all launchers start together.
        first_rank: of its first worker; the others' follow.
        node: its number among the launchers.
        nodes: how many launchers there are.
        master_addr: where rank 0 is reached.
        master_port: a port there that is free for rank 0 to listen at.
        run_id: name of the run.
        restart: how often the world was started again after failures.
        max_restarts: how often that is done at most.
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
    """What `torchrun` sets for a worker (environment variables of torch.distributed.run), and scripts read.

    Args:
        place: of the launcher.
        index: of the worker among those of its launcher, from 0.
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
        # The launcher has no store of torch's: rank 0 opens the one at MASTER_PORT.
        _AGENT_STORE: "False",
    }


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What all workers of one launcher are told of their job.

    Attributes:
        coordinator: its address, "host:port".
        job: name of the job.
        min_workers: the first view forms with at least this many.
        max_workers: no view has more.
        advertise: host at which peers reach them, each with a port of its own; None: they find it by themselves.
        place: where they stand, if their ranks are known before they join; None: the view gives them.
        token: made for them by this launcher; None: they have that of its environment, if there is one.
    """

    coordinator: str
    job: str
    min_workers: int
    max_workers: int
    advertise: str | None = None
    place: Place | None = None
    token: str | None = field(default=None, repr=False)


def worker_bounds(workers: int, minimum: int | None, maximum: int | None) -> tuple[int, int]:
    """The job's (min_workers, max_workers) for a launcher that starts `workers` of them.

    By default the job is exactly what this launcher starts. With a minimum above that, other launchers bring the
    rest, and the job is full when it is there.

    Raises:
        ValueError: the numbers cannot be; the text is for the person at the command line.
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
        raise ValueError(f"-n {workers} workers do not fit a job of at most {high} (--max)")
    return low, high


def worker_environment(
    base: Mapping[str, str], settings: WorkerSettings, launcher_fd: int, index: int = 0
) -> dict[str, str]:
    """The environment of a worker: the launcher's own, and what Paceline adds.

    Args:
        base: the launcher's environment; what the user has set there stays, but for the job itself.
        settings: the job.
        launcher_fd: the worker's end of the pipe to its launcher.
        index: of the worker among those of its launcher.
    """
    place = settings.place
    # The launcher's own explicit rank would be the same one in every worker.
    environment = {name: value for name, value in base.items() if name not in (*_RANKS, *_BOUNDS)}
    environment |= {
        "PACELINE_COORDINATOR": settings.coordinator,
        "PACELINE_JOB": settings.job,
        LAUNCHER_FD: str(launcher_fd),
    }
    if place is None:  # the view gives the rank
        own = (str(settings.min_workers), str(settings.max_workers))
        environment |= dict(zip(_BOUNDS, own, strict=True))
    else:  # the rank in Paceline's groups is the one that torch is told
        own = (str(place.first_rank + index), str(place.world_size))
        environment |= dict(zip(_RANKS, own, strict=True)) | torch_variables(place, index)
    if settings.token is not None:  # never in an argument, which all users of the machine can read
        environment["PACELINE_TOKEN"] = settings.token
    if settings.advertise is not None:
        environment["PACELINE_ADVERTISE"] = settings.advertise
    # NumPy's BLAS takes a thread per core in each process. With a worker per core that is cores squared threads which
    # spin against each other and against the links: 4 workers on 2 cores train several times slower.
    # torchrun leaves a worker that is alone on its node all cores; so it is where it is told of torchrun's world.
    if place is None or place.workers > 1:
        for name in _THREAD_POOLS:
            environment.setdefault(name, "1")
    # A line is worth reading when it is printed; and a worker that is killed keeps nothing back in a buffer.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # A crash in native code shows where it was, rather than a bare SIGSEGV.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    return environment
