"""The coordinator dies, comes back, or comes back without its memory: training goes on."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.relay import relay

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("wrapper", "world"), [("ddp", 3), ("hybrid_shard", 4)])
@pytest.mark.sampled(2)
def test_training_survives_a_coordinator_restart(wrapper: str, world: int, tmp_path: Path) -> None:
    with cluster(tmp_path, total=60, pace=0.04, wrapper=wrapper) as c:
        c.start(world)
        c.wait_for_step(5)
        c.kill_coordinator()
        c.wait_for_step(20)  # the ring goes on without it
        c.start_coordinator()
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=world)
        assert not c.redone(), str(c)


@pytest.mark.timeout(120)
def test_training_continues_through_a_long_coordinator_outage(tmp_path: Path) -> None:
    with cluster(tmp_path, total=240, pace=0.05, failure_timeout=0.6) as c:
        c.start(2)
        c.wait_for_step(5)
        c.kill_coordinator()
        time.sleep(6)
        before = max(event["step"] for trainer in c.trainers for event in trainer.of("applied"))
        c.wait_for_step(before + 5)  # they still train
        c.start_coordinator()
        assert set(c.wait(60.0).values()) == {0}, str(c)
        c.check(count=2)
        assert not c.redone(), str(c)
        assert len(set(c.line().values())) == 1, "one generation from the first step to the last"


@pytest.mark.parametrize("wrapper", [pytest.param("ddp", marks=pytest.mark.exhaustive), "hybrid_shard"])
def test_resetting_all_streams_to_the_coordinator_evicts_no_member(wrapper: str, tmp_path: Path) -> None:
    with (
        cluster(tmp_path, least=4, total=60, pace=0.05, failure_timeout=1.0, wrapper=wrapper) as c,
        relay(c.address) as between,
    ):
        c.environment["PACELINE_COORDINATOR"] = between.address
        c.start(4)
        for step in (5, 20, 35):
            c.wait_for_step(step)
            with c.slowly():
                c.wait_until(lambda: between.connections >= 4, "all are connected again")
            between.reset_all()
        assert set(c.wait().values()) == {0}, str(c)
        assert between.resets >= 12
        c.check(count=4)
        assert not c.redone(), str(c)
        assert len(set(c.line().values())) == 1, "one generation from the first step to the last"


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("hybrid_shard", marks=pytest.mark.exhaustive)])
def test_corrupted_bytes_to_the_coordinator_end_no_worker(wrapper: str, tmp_path: Path) -> None:
    with (
        cluster(tmp_path, least=4, total=200, pace=0.05, failure_timeout=2.0, wrapper=wrapper) as c,
        relay(c.address) as between,
    ):
        c.environment["PACELINE_COORDINATOR"] = between.address
        c.start(4)
        c.wait_for_step(5)
        between.damage = 400
        c.wait_for_step(180)
        between.damage = 0
        assert set(c.wait(50.0).values()) == {0}, str(c)
        assert between.damaged >= 10
        c.check(count=4)


@pytest.mark.parametrize(
    ("wrapper", "world", "rest"), [pytest.param("ddp", 3, 2, marks=pytest.mark.exhaustive), ("hybrid_shard", 4, 2)]
)
def test_survivors_train_on_after_a_kill_during_a_coordinator_outage(
    wrapper: str, world: int, rest: int, tmp_path: Path
) -> None:
    with cluster(tmp_path, total=60, pace=0.04, failure_timeout=1.0, wrapper=wrapper) as c:
        c.start(world)
        c.wait_for_step(5)
        c.kill_coordinator()
        c.wait_for_step(10)
        c.trainers[2].signal(signal.SIGKILL)
        time.sleep(4)  # long after failure_timeout; the others park
        c.start_coordinator()
        assert sorted(c.wait().values()) == [-9] + [0] * (world - 1), str(c)
        c.check(count=rest)
        assert sum(c.redone().values()) <= 1, str(c)


@pytest.mark.parametrize("wrapper", [pytest.param("ddp", marks=pytest.mark.exhaustive), "full_shard"])
def test_training_survives_a_lost_state_file(wrapper: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=3, total=80, pace=0.05, wrapper=wrapper) as c:
        c.start(3)
        c.wait_for_step(8)
        with c.slowly():
            c.kill_coordinator()
            for file in tmp_path.glob("state.db*"):
                file.unlink()
            before = max(c.line().values())
            c.start_coordinator()
            c.wait_until(lambda: max(c.line().values()) > before, "another generation trains")
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        line = c.line()
        assert line[80] > line[8], "generations went on above those that members had seen"


def test_training_survives_a_state_file_restored_from_a_backup(tmp_path: Path) -> None:
    """The backup is older than the generation that trains (docs/how-to/back-up-the-state.md)."""
    backup = tmp_path / "backup"
    backup.mkdir()
    with cluster(tmp_path, least=2, total=100, pace=0.05) as c:
        c.start(2)
        c.wait_for_step(5)
        c.kill_coordinator()
        for file in tmp_path.glob("state.db*"):
            shutil.copy(file, backup)
        c.start_coordinator()
        (late,) = c.start(1)
        c.wait_until(lambda: bool(late.of("applied")), "the newcomer trains")
        with c.slowly():
            c.kill_coordinator()
            for file in tmp_path.glob("state.db*"):
                file.unlink()
            for file in backup.iterdir():
                shutil.copy(file, tmp_path)
            before = max(c.line().values())
            c.start_coordinator()
            c.wait_until(lambda: max(c.line().values()) > before, "another generation trains")
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)


def test_a_newcomer_waits_for_the_coordinator(tmp_path: Path) -> None:
    with cluster(tmp_path, total=100, pace=0.04) as c:
        c.start(2)
        c.wait_for_step(5)
        c.kill_coordinator()
        (late,) = c.start(1)
        c.wait_for_step(12)
        c.start_coordinator()
        c.wait_until(lambda: bool(late.of("applied")), "the newcomer trains")
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
