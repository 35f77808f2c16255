"""The elastic loaders in real processes: whoever dies, freezes or comes, the numbers are those of one process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline import checkpoint
from support.elastic.brake import Brake
from support.elastic.cluster import cluster
from support.elastic.faults import freeze, kill

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("phase", "loader"),
    [
        ("late_all_reduce", {"data_workers": 0}),
        ("forward", {"data_workers": 2}),
        ("forward", {"stream_workers": 1}),
        ("forward", {"stream_workers": 1, "stream_shards": 5}),
        ("loading", {"stream_workers": 1, "stream_shards": 5}),
    ],
)
def test_loaders_survive_a_kill_in_the_middle_of_an_epoch(phase: str, loader: dict[str, int], tmp_path: Path) -> None:
    with cluster(tmp_path, total=12, wrapper="torch", bucket_mb=1e-4, **loader) as c:
        # In step 6 an epoch begins, so the others wait in a collective for what this worker's shards have.
        c.start(3, [kill(phase, rank=1, step=6 if phase == "loading" else 8)])
        assert sorted(c.wait().values()) == [-signal.SIGKILL, 0, 0], str(c)
        c.check(count=2)


@pytest.mark.parametrize(
    "loader",
    [
        {"data_workers": 2},
        {"stream_workers": 1, "stream_shards": 5},
        pytest.param({"stream_workers": 1}, marks=pytest.mark.exhaustive),
    ],
)
def test_loaders_survive_a_freeze_a_join_and_a_drain(loader: dict[str, int], tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=60, pace=0.02, failure_timeout=2.0, wrapper="torch", **loader) as c:
        brake = Brake(tmp_path / "brake")
        (new,) = c.start(1, go=False)  # to load torch takes longer than all the steps
        first = c.start(2, [freeze("forward", 4.0, rank=1, step=8)])
        c.wait_until(lambda: any(trainer.of("fault") for trainer in first), "one freezes")
        brake.press("until all are there")
        (frozen,) = [trainer for trainer in first if trainer.of("fault")]
        (other,) = [trainer for trainer in first if trainer is not frozen]
        new.go()
        c.wait_until(lambda: bool(new.of("applied")), "the new one trains")
        c.wait_until(lambda: frozen.of("view")[-1]["size"] == 3, "the frozen one is back")
        brake.release("until all are there")
        other.signal(signal.SIGTERM)
        assert set(c.wait().values()) == {0}, str(c)
        assert other.of("dismissed"), str(c)
        assert [event["size"] for event in other.of("view")][-1] == 3, str(c)
        c.check(count=2)


@pytest.mark.parametrize("shards", [0, 5])
def test_new_workers_resume_the_data_from_a_checkpoint(shards: int, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(
        tmp_path, least=2, total=60, pace=0.02, wrapper="torch", stream_workers=1, stream_shards=shards,
        checkpoint_dir=str(runs), checkpoint_every=7,
    ) as c:  # fmt: skip
        c.start(2)
        c.wait_until(lambda: bool(checkpoint.tags(runs)), "a checkpoint from the middle of an epoch")
        for trainer in c.trainers:
            trainer.signal(signal.SIGKILL)
        for trainer in c.trainers:
            trainer.process.wait()
        c.start(3, model_seed=99)
        assert sorted(c.wait().values()) == [-signal.SIGKILL, -signal.SIGKILL, 0, 0, 0], str(c)
        c.check(count=3)
