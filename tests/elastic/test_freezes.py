"""Silence: SIGSTOP shorter and longer than failure_timeout, and a thread that keeps the interpreter lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import freeze, hold_gil

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("wrapper", ["ddp", "shard_grad_op"])
def test_a_short_freeze_costs_nothing(wrapper: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=8, wrapper=wrapper) as c:
        c.start(3, [freeze(at="forward", seconds=0.8, rank=1, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        assert not c.redone(), str(c)


@pytest.mark.parametrize(
    ("wrapper", "world", "phase"),
    [
        *(
            (wrapper, world, phase)
            for wrapper, world in [("ddp", 3), ("hybrid_shard", 4), ("full_shard", 3)]
            for phase in ["forward", "mid_all_reduce", "behind_gate"]
        ),
        ("shard_grad_op", 3, "mid_reduce_scatter"),
    ],
)
def test_a_long_freeze_goes_on_without_the_member_which_comes_back(
    phase: str, wrapper: str, world: int, tmp_path: Path
) -> None:
    """Where nobody else has its part of the state, it is waited for."""
    with cluster(tmp_path, least=2, total=120, pace=0.05, failure_timeout=1.0, wrapper=wrapper) as c:
        c.start(world, [freeze(at=phase, seconds=2.5, rank=1, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=world)
        assert sum(c.redone().values()) <= 2, str(c)
        (frozen,) = [t for t in c.trainers if t.of("fault")]
        assert frozen.of("applied")[-1]["generation"] > frozen.of("applied")[0]["generation"], str(c)


@pytest.mark.parametrize("wrapper", ["ddp", "full_shard"])
def test_holding_the_interpreter_lock_is_silence_and_passes(wrapper: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=120, pace=0.05, failure_timeout=1.0, wrapper=wrapper) as c:
        c.start(3, [hold_gil(at="forward", seconds=4.0, rank=2, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
