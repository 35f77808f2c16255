"""Silence: SIGSTOP shorter and longer than failure_timeout, and a thread that keeps the interpreter lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import freeze, hold_gil

pytestmark = pytest.mark.slow


def test_a_short_freeze_costs_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=8) as c:
        c.start(3, [freeze(at="forward", seconds=0.8, rank=1, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        assert not c.redone(), str(c)


@pytest.mark.parametrize("phase", ["forward", "mid_all_reduce", "behind_gate"])
def test_a_long_freeze_goes_on_without_the_member_which_comes_back(phase: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=120, pace=0.05, failure_timeout=1.0) as c:
        c.start(3, [freeze(at=phase, seconds=2.5, rank=1, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        assert sum(c.redone().values()) <= 2, str(c)
        (frozen,) = [t for t in c.trainers if t.of("fault")]
        assert frozen.of("applied")[-1]["generation"] > frozen.of("applied")[0]["generation"], str(c)


def test_holding_the_interpreter_lock_is_silence_and_passes(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=120, pace=0.05, failure_timeout=1.0) as c:
        c.start(3, [hold_gil(at="forward", seconds=4.0, rank=2, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
