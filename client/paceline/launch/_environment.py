"""Computes a worker's environment variables, and the cores that it may use.

Pure, except that it asks the system which cores there are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from paceline._base.launcher_variables import LAUNCH, TORCH_WORLD, TORCH_WORLD_NAMES
from paceline._session.launcher_pipe import LAUNCHER_FD
from paceline._session.output_file import OUTPUT_FD
from paceline.engines._variables import variables_of

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
    """
    if workers < 2 or workers > len(cores):
        return None
    ordered = sorted(cores)
    return set(ordered[index * len(ordered) // workers : (index + 1) * len(ordered) // workers])


def allowed_cores() -> set[int]:
    """Returns the cores that this process may use; empty if the system does not tell."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings that all workers of one launcher get.

    Attributes:
        coordinator: its address, "host:port".
        job: name of the job.
        min_workers: the first view forms with at least this many workers; replicas, if its members are replicas.
        max_workers: no view has more workers, or replicas.
        advertise: host at which peers reach the workers, each at its own port; None if they find it themselves.
        token: the token that this launcher made for them; None for the one in its environment, if any.
        at_once: how many workers the launcher starts at its beginning. The job waits for them before it begins, for 3/4
            of `Config.join_timeout` and a minute at most after the first has come, or until the launcher reports that
            one has ended. Leave it out, unless it reports that, as `paceline run` does.
        launch_id: names this run of the launcher.
    """

    coordinator: str
    job: str
    min_workers: int
    max_workers: int
    advertise: str | None = None
    token: str | None = field(default=None, repr=False)
    at_once: int = 1
    launch_id: str = field(default_factory=lambda: token_hex(10), compare=False)


def worker_bounds(
    workers: int, minimum: int | None, maximum: int | None, replica_size: int | None = None
) -> tuple[int, int]:
    """Returns the job's (min_workers, max_workers) for a launcher that starts `workers` of them.

    By default the job has exactly the workers that this launcher starts. With a minimum above that, other launchers
    start the rest, and the job is full when the minimum is reached. With a `replica_size` the bounds count replicas.

    Raises:
        ValueError: the numbers are invalid; the text is for the person at the command line.
    """
    if workers < 1:
        raise ValueError(f"-n must be 1 or more, not {workers}")
    if replica_size is not None and replica_size < 1:
        raise ValueError(f"--replica-size must be 1 or more, not {replica_size}")
    members, rest = divmod(workers, replica_size or 1)
    if rest:
        raise ValueError(f"-n {workers} is no multiple of --replica-size {replica_size}: -n counts processes")
    noun = "workers" if replica_size is None else "replicas"
    if maximum is not None and maximum < members:
        all_of = f"-n {workers} workers" if replica_size is None else f"-n {workers}: {members} replicas"
        raise ValueError(f"{all_of} do not fit into a job of at most {maximum} (--max)")
    low = members if minimum is None else minimum
    if low < 1:
        raise ValueError(f"--min must be 1 or more, not {low}")
    high = max(low, members) if maximum is None else maximum
    if high < low:
        raise ValueError(f"--max {high} is below the minimum of {low} {noun}")
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
        launcher_fd: the worker's end of the pipe to `paceline run`; None for a launcher that reads none. Leave it out:
            what it carries is no public interface.
        index: number of the worker among those of its launcher, from 0.
        compiled: a folder for what torch compiles in this process; None for torch's own, which all processes share.
            Leave it out, unless your scheduler removes the folder of each process that was killed.
    """
    # An explicit rank in the launcher's environment would be the same in every worker.
    outer = {*_RANKS, *_BOUNDS, LAUNCH, LAUNCHER_FD, OUTPUT_FD, TORCH_WORLD}
    if TORCH_WORLD in base:  # else these are the user's
        outer.update(TORCH_WORLD_NAMES)
    environment = {name: value for name, value in base.items() if name not in outer}
    environment |= {
        "PACELINE_COORDINATOR": settings.coordinator,
        "PACELINE_JOB": settings.job,
        LOCAL_RANK: str(index),
    }
    if launcher_fd is not None:
        environment[LAUNCHER_FD] = str(launcher_fd)
    own = (str(settings.min_workers), str(settings.max_workers))
    environment |= dict(zip(_BOUNDS, own, strict=True))
    if settings.at_once > 1:
        environment[LAUNCH] = f"{settings.launch_id}:{settings.at_once}"
    if settings.token is not None:  # never in an argument, which all users of the machine can read
        environment["PACELINE_TOKEN"] = settings.token
    if settings.advertise is not None:
        environment["PACELINE_ADVERTISE"] = settings.advertise
    # NumPy's BLAS takes a thread per core in each process. With a worker per core that is cores squared threads which
    # spin against each other and against the links: 4 workers on 2 cores train several times slower.
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


def without_torchruns(base: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables by which torchrun makes its own agent the place where ranks meet."""
    return {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}


def torch_world(index: int, size: int, port: int) -> dict[str, str]:
    """Returns what `torch.distributed.init_process_group()` finds in a worker: the world of its replica, or of all.

    LOCAL_RANK goes on from replica to replica, as torch and scripts choose a GPU by it, and LOCAL_WORLD_SIZE is such
    that WORLD_SIZE / LOCAL_WORLD_SIZE is the number of hosts.

    Args:
        index: number of the worker among those of its launcher, from 0; replicas follow each other.
        size: ranks of the world.
        port: where its rank 0 will listen, on this host.
    """
    values = (str(index % size), str(size), str(index), str(size), "127.0.0.1", str(port))
    return dict(zip(TORCH_WORLD_NAMES, values, strict=True))
