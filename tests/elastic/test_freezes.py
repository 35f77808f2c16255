"""Silence: SIGSTOP shorter and longer than failure_timeout, and a thread that keeps the interpreter lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import freeze, hang, hold_gil

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("wrapper", ["ddp", "shard_grad_op"])
def test_a_short_freeze_redoes_no_step(wrapper: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=3, total=8, wrapper=wrapper) as c:
        c.start(3, [freeze(at="forward", seconds=0.8, rank=1, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        assert not c.redone(), str(c)


@pytest.mark.parametrize(
    ("wrapper", "world", "phase"),
    [
        ("ddp", 3, "forward"),
        ("hybrid_shard", 4, "mid_all_reduce"),
        ("shard_grad_op", 3, "mid_reduce_scatter"),
    ],
)
@pytest.mark.sampled(3)
def test_a_member_rejoins_after_a_long_freeze(phase: str, wrapper: str, world: int, tmp_path: Path) -> None:
    """Where nobody else has its part of the state, it is waited for."""
    with cluster(tmp_path, least=2, most=world, total=30, pace=0.05, failure_timeout=1.0, wrapper=wrapper) as c:
        c.start(world, [freeze(at=phase, rank=1, step=3)])
        c.wait_until(lambda: any(t.of("undone") for t in c.trainers), "the others have given it up")
        (frozen,) = [t for t in c.trainers if t.of("fault")]
        frozen.thaw()
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=world)
        assert sum(c.redone().values()) <= 2, str(c)
        assert frozen.of("applied")[-1]["generation"] > frozen.of("applied")[0]["generation"], str(c)


@pytest.mark.parametrize("wrapper", ["ddp", "full_shard"])
@pytest.mark.sampled(2)
def test_holding_the_interpreter_lock_redoes_no_step(wrapper: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=3, total=8, failure_timeout=1.0, wrapper=wrapper) as c:
        c.start(3, [hold_gil(at="forward", seconds=4.0, rank=2, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        assert not c.redone(), str(c)


@pytest.mark.parametrize("phase", ["forward", "between_steps"])
def test_a_member_that_hangs_in_its_own_code_is_evicted_and_rejoins(phase: str, tmp_path: Path) -> None:
    """It heartbeats on: a timeout names it, and it has `failure_timeout` to stop."""
    awake = tmp_path / "awake"
    with cluster(tmp_path, most=3, total=30, pace=0.05, failure_timeout=1.0, step_timeout=4.0) as c:
        trainers = c.start(3, [hang(at=phase, until=awake, rank=1, step=3)])
        c.wait_until(lambda: any(e["size"] == 2 for t in trainers for e in t.of("view")), "the others go on")
        (stuck,) = [t for t in trainers if t.of("fault")]
        stuck.hold_others()
        awake.touch()
        assert set(c.wait(90.0).values()) == {0}, str(c)
        c.check(count=3)
        assert stuck.of("view")[-1]["size"] == 3, f"it came back\n{c}"
