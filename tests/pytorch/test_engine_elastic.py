"""Elastic training with Gloo carrying gradients: the invariants hold as over links, whoever dies, freezes or joins."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.elastic.cluster import Cluster, cluster
from support.elastic.faults import freeze, kill

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow]


def over_gloo(c: Cluster) -> None:
    c.environment["PACELINE_ENGINE"] = "gloo"


@pytest.mark.parametrize(
    ("phase", "world"),
    [
        ("in_word", 3),
        pytest.param("in_engine", 4, marks=pytest.mark.newest),
        pytest.param("in_engine", 2, marks=pytest.mark.exhaustive),
        pytest.param("behind_gate", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_survivors_train_on_after_a_kill(phase: str, world: int, tmp_path: Path) -> None:
    with cluster(tmp_path, total=12, wrapper="torch", bucket_mb=1e-4) as c:
        over_gloo(c)
        c.start(world, [kill(phase, rank=1, step=4)])
        assert sorted(c.wait().values()) == [-signal.SIGKILL] + [0] * (world - 1), str(c)
        c.check(count=world - 1)
        c.check_losses(12)
        c.check_samples(12)


def test_a_frozen_worker_rejoins(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=160, pace=0.05, wrapper="torch") as c:
        over_gloo(c)
        c.start(3, [freeze("in_engine", seconds=5.0, rank=1, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        assert sum(c.redone().values()) <= 2, str(c)
        (frozen,) = [t for t in c.trainers if t.of("fault")]
        assert frozen.of("applied")[-1]["generation"] > frozen.of("applied")[0]["generation"], str(c)


@pytest.mark.exhaustive
def test_a_join_and_a_drain_redo_no_step(tmp_path: Path) -> None:
    with cluster(tmp_path, total=120, pace=0.03, wrapper="torch") as c:
        over_gloo(c)
        (new,) = c.start(1, go=False)  # to load torch takes longer than all the steps
        first = c.start(2)
        c.wait_for_step(3)
        new.go()
        c.wait_until(lambda: bool(new.of("applied")), "the new one trains")
        first[0].signal(signal.SIGTERM)
        assert set(c.wait().values()) == {0}, str(c)
        assert first[0].of("dismissed"), str(c)
        c.check(count=2)
        c.check_samples(120)
        assert not c.redone(), f"nobody failed, so nothing is redone\n{c}"
