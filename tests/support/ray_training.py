"""What actors train in tests on Ray, and what must be true of what they told. Workers import this file."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from support.elastic.cluster import Cluster
from support.elastic.problem import BATCH, SAMPLES, build, data
from support.elastic.trainer import digest, numbers

__all__ = ["CannotGoOn", "RayRecords", "fail", "train"]

_SLOW_S = 0.5


def train(session: Any, folder: str, total: int, pace: float, killed_by_ray: int = 0) -> tuple[int, int]:
    """Trains the problem of tests/elastic, and tells of it in FOLDER/PID. Returns its rank and process id.

    Args:
        session: what `paceline_ray.run` gives.
        folder: where all tell.
        total: the last step.
        pace: seconds of computing in each step. In the second half it is `_SLOW_S` until the file FOLDER.over is there,
            so that training does not end before the test has done what it does to it.
        killed_by_ray: the step in which rank 1 has Ray kill its actor; 0 for none.
    """
    told = os.open(f"{folder}/{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def emit(event: str, **facts: Any) -> None:
        os.write(told, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())

    x, t = data()
    model = build(5)
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.Adam(model, lr=0.01)
    sampler = paceline.ElasticSampler(SAMPLES, global_batch=BATCH)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    session.on_view(lambda: emit("view", rank=session.rank, size=session.size))
    session.on_commit(lambda number: emit("committed", step=number))
    try:
        for step in session.steps(state, total=total):
            with step:
                used = step.indices.tolist() if step.weight else []
                emit("attempt", generation=step.generation, step=step.number, rank=step.rank, indices=used)
                waits = step.number > total // 2 and not Path(f"{folder}.over").exists()
                time.sleep(_SLOW_S if waits else pace)
                if step.number == killed_by_ray and step.rank == 1:
                    _have_ray_kill(folder)
                loss, dy = paceline.nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
                emit("loss", generation=step.generation, step=step.number, value=float(loss) * step.weight)
                optimizer.zero_grad()
                ddp.backward(dy, step.weight)
                optimizer.step()
            emit("applied" if step.applied else "undone", generation=step.generation, step=step.number)
    except paceline.Dismissed:
        emit("dismissed")
        raise
    large = state._core.large()
    emit("done", step=state.step, generation=session.generation, digest=digest(large), weights=numbers(large))
    return session.rank, os.getpid()


def _have_ray_kill(folder: str) -> None:
    """Once in a run: the step is undone, and comes again."""
    import ray

    with suppress(FileExistsError):
        Path(f"{folder}.killed").touch(exist_ok=False)
        ray.kill(ray.get_runtime_context().current_actor)
        signal.pause()  # the process ends a moment later


class CannotGoOn(ValueError):
    """What the training function of a test raises."""


def fail(session: Any) -> None:
    """Rank 1 raises an error of its own in a job that trains."""
    total = session.group.all_reduce(np.ones(1))
    assert total[0] == session.size
    if session.rank == 1:
        raise CannotGoOn("the user's code failed")
    session.group.barrier()


class _Told:
    """What one process has told."""

    def __init__(self, path: Path) -> None:
        self.pid = int(path.name)
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # the last one may be half written
        self.events: list[dict[str, Any]] = [json.loads(line) for line in whole]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [event for event in self.events if event["event"] == kind]


class RayRecords(Cluster):
    """What all processes of a run have told, with the checks of tests/elastic. It has no processes of its own."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder, self.total = folder, total
        self._scheduled = False

    @property
    def trainers(self) -> Sequence[Any]:  # type: ignore[override]
        """Read anew each time."""
        return [_Told(path) for path in sorted(self.folder.iterdir())]

    def wait_until(self, happened: Callable[[], bool], what: str, timeout: float = 45.0) -> None:
        """Waits for something that the files show."""
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, f"not within {timeout} s: {what}\n{self}"
            time.sleep(0.02)

    def in_view(self, size: int) -> list[int]:
        """The process ids that are in a view of that many now, in the order of ranks; empty without such a view."""
        last = [(told.of("view")[-1], told.pid) for told in self.trainers if told.of("view")]
        alive = [(view["rank"], pid) for view, pid in last if view["size"] == size and Path(f"/proc/{pid}").exists()]
        return [pid for _, pid in sorted(alive)] if len(alive) == size else []

    def step(self) -> int:
        """The last committed step."""
        return max((event["step"] for told in self.trainers for event in told.of("committed")), default=0)

    def __str__(self) -> str:
        lines = []
        for told in self.trainers:
            lines.append(f"--- pid {told.pid}")
            for event in told.events[-40:]:
                facts = {k: v for k, v in event.items() if k not in ("at", "event", "weights", "indices")}
                lines.append(f"  {event['at']:.3f} {event['event']} {facts}")
        return "\n".join(lines)
