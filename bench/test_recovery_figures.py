"""Measures how soon elastic training continues after a kill, over each kind of link."""

from __future__ import annotations

import signal
import statistics
import time
from pathlib import Path

import pytest

from support.elastic.cluster import Cluster, Trainer, cluster

pytestmark = pytest.mark.timeout(180)

HIDDEN = 43_000
"""Neurons: with Adam's two moments 10.3 MB of state in float64."""

KILLS = 5


def test_recovery_over_shm_and_tcp_is_as_fast_as_over_grpc(tmp_path: Path) -> None:
    """Compares shm and tcp with gRPC by the median time from a kill to the next committed step."""
    medians = {}
    for kind in ("grpc", "tcp", "shm"):
        folder = tmp_path / kind
        folder.mkdir()
        medians[kind] = statistics.median(recoveries(folder, kind))
    bound = 1.2 * medians["grpc"] + 0.05
    assert max(medians.values()) <= bound, medians


def recoveries(folder: Path, kind: str) -> list[float]:
    """Kills one of four several times; returns the seconds until all others first commit in another generation."""
    found = []
    with cluster(folder, least=2, total=100_000, hidden=HIDDEN) as c:
        c.environment["PACELINE_LINKS"] = kind
        c.start(4)
        for number in range(KILLS):
            wait_for_world(c, 4)
            victim = alive(c)[number % 4]
            others = [trainer for trainer in alive(c) if trainer is not victim]
            before = max(trainer.of("attempt")[-1]["generation"] for trainer in others)
            at = time.monotonic()
            victim.signal(signal.SIGKILL)
            c.wait_until(lambda o=others, g=before: all(commit_after(t, g) for t in o), "all survivors continue")  # type: ignore[misc]
            found.append(max(commit_after(trainer, before) for trainer in others) - at)
            c.start(1)
    return found


def alive(c: Cluster) -> list[Trainer]:
    """Returns the workers whose processes run."""
    return [trainer for trainer in c.trainers if trainer.process.poll() is None]


def wait_for_world(c: Cluster, size: int) -> None:
    """Waits until all live workers have committed a step in one view of that size."""

    def settled() -> bool:
        views = [trainer.of("view")[-1] for trainer in alive(c) if trainer.of("view")]
        if len(views) < size or {v["size"] for v in views} != {size} or len({v["generation"] for v in views}) != 1:
            return False
        return all(commit_after(trainer, views[0]["generation"] - 1) for trainer in alive(c))

    c.wait_until(settled, f"a world of {size}")


def commit_after(trainer: Trainer, generation: int) -> float:
    """Returns when this member learned of a commit in a generation after `generation`; 0.0 for not yet."""
    began = next((e["at"] for e in trainer.of("attempt") if e["generation"] > generation), None)
    if began is None:
        return 0.0
    return next((float(e["at"]) for e in trainer.of("committed")[-2000:] if e["at"] > began), 0.0)
