"""A torch model in `session.steps`, in real processes: the same numbers as of the NumPy model, whoever is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import kill

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow]


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("in_word", marks=pytest.mark.newest),
        pytest.param("late_all_reduce", marks=pytest.mark.exhaustive),  # test_data_elastic has it too
        "behind_gate",
    ],
)
def test_two_of_three_workers_survive_a_kill(phase: str, tmp_path: Path) -> None:
    with cluster(tmp_path, total=12, wrapper="torch", bucket_mb=1e-4) as c:
        c.start(3, [kill(phase, rank=1, step=4)])
        assert sorted(c.wait().values()) == [-signal.SIGKILL, 0, 0], str(c)
        c.check(count=2)
        c.check_losses(12)
        c.check_samples(12)


def test_a_join_and_a_drain_redo_no_step(tmp_path: Path) -> None:
    with cluster(tmp_path, total=120, pace=0.03, wrapper="torch") as c:
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


@pytest.mark.exhaustive
def test_new_workers_resume_from_the_checkpoint_of_a_drain(tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoints")
    with cluster(tmp_path, least=2, total=60, pace=0.04, checkpoint_dir=where, wrapper="torch") as c:
        c.start(2)
        c.wait_for_step(5)
        for trainer in c.trainers:
            trainer.signal(signal.SIGTERM)
        for trainer in c.trainers:
            assert trainer.process.wait(30) == 0, str(c)
        c.start(2, model_seed=99)
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=2)
