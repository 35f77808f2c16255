"""Trains on a Ray cluster: actors host the workers, and training goes on when an actor or a node dies (decision 22).

    def train(session):
        ...
        for step in session.steps(state, total=1000):
            ...
        return float(loss)

    ray.init(address="auto")
    losses = paceline_ray.run(train, min_workers=2, max_workers=8, resources={"CPU": 4, "GPU": 1})

With Ray Train, its `TorchTrainer` starts the workers, and `PacelineConfig` lets them die and be replaced.

Needs the extra "ray", or "ray-train". Ray itself ships functions, arguments and results, by cloudpickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline_ray._reports import report

if TYPE_CHECKING:
    from paceline import Config
    from paceline_ray._train import PacelineConfig

__all__ = ["PacelineConfig", "report", "run"]


def __getattr__(name: str) -> Any:
    """Imports Ray Train, and torch with it, when `PacelineConfig` is used."""
    if name != "PacelineConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paceline_ray._train import PacelineConfig

    return PacelineConfig


def run(
    fn: Callable[..., Any],
    *args: Any,
    min_workers: int,
    max_workers: int | None = None,
    replica_size: int | None = None,
    resources: Mapping[str, float] | None = None,
    restarts: int = 10,
    job: str = "default",
    coordinator: str | None = None,
    config: Config | None = None,
) -> dict[int, Any]:
    """Runs `fn(session, *args)` in actors of the Ray cluster that this process is connected to, and waits for its end.

    `session` is what `paceline.join` returns; it is left when `fn` returns. Ray gets one request for each worker. The
    job begins when `min_workers` have room, and the others join when they have. If an actor, its process or its node
    dies, the others go on, and a new actor replaces it as soon as Ray has room for it.

    Ctrl-C, or SIGTERM, lets all workers leave at the end of their step; a second one kills them.

    Args:
        fn: the training function.
        args: further arguments for it.
        min_workers: the job does not go on with fewer workers.
        max_workers: how many workers to ask Ray for; `min_workers` if left out.
        replica_size: if given, each worker is a replica of so many ranks, which hold one copy of the model between
            them: `min_workers`, `max_workers` and `restarts` count replicas, Ray finds room for all ranks of one
            together, each rank is an actor, and `fn` finds its replica as torch's default process group.
        resources: what each worker, or each rank of a replica, takes: "CPU", "GPU", "memory" (bytes), or a resource of
            the cluster; one CPU if left out.
        restarts: how often each worker is replaced at most. A worker that fails three times in a row within 5 s,
            before it had joined the job, is given up earlier.
        job: name of the job.
        coordinator: address of a coordinator that the nodes reach. If left out, this process runs one for the time of
            the call, on its node's address, with a token of its own.
        config: timeouts and limits of the workers; those of this process's environment if left out.

    Returns:
        What `fn` returned, by rank, for the members of the last generation, in the order of ranks; rank p of replica r
        has number r * replica_size + p. Workers that died at the very end or were drained are missing.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        RuntimeError: this process is not connected to a Ray cluster, or only as a Ray client.
        ValueError: an argument or a PACELINE_* variable is invalid.
        ray.exceptions.RayTaskError: `fn` raised, and too few workers were left; it is also an instance of the error's
            own class. Its text has the worker's traceback, and a note names the rank.
        ray.exceptions.RayActorError: actors died, and too few workers were left.
        KeyboardInterrupt: Ctrl-C, after the workers have left.
        SystemExit: SIGTERM, after the workers have left; with code 0 if all left well.
    """
    # Only the driver needs it: an actor's process, which imports this package too, would start more slowly.
    from paceline_ray._controller import run_workers

    return run_workers(
        fn,
        args,
        min_workers=min_workers,
        max_workers=min_workers if max_workers is None else max_workers,
        replica_size=replica_size,
        resources={"CPU": 1.0} if resources is None else resources,
        restarts=restarts,
        job=job,
        coordinator=coordinator,
        config=config,
    )
