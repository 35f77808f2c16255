"""What a worker finds in its environment. Pure: takes one mapping, returns another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.cli.launcher.place import Place, torch_variables
from paceline.session.launcher import LAUNCHER_FD

__all__ = ["WorkerSettings", "worker_bounds", "worker_environment"]

_THREAD_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_RANKS = ("PACELINE_RANK", "PACELINE_WORLD_SIZE")

_BOUNDS = ("PACELINE_MIN_WORKERS", "PACELINE_MAX_WORKERS")


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
