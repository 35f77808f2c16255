"""The heart of it in real processes, quick enough for every run: a death, a newcomer, a drain, no coordinator."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import kill


def test_survivors_train_on_after_a_kill_in_an_all_reduce(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=3, total=6) as c:
        c.start(3, [kill(at="mid_all_reduce", rank=1, step=3)])
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, str(c)


def test_a_join_and_a_drain_redo_no_step(tmp_path: Path) -> None:
    with cluster(tmp_path, total=60, pace=0.03) as c:
        (old,) = c.start(1)
        c.wait_for_step(2)
        (new,) = c.start(1, model_seed=99)
        c.wait_until(lambda: bool(new.of("applied")), "the newcomer trains")
        old.signal(signal.SIGTERM)
        assert set(c.wait().values()) == {0}, str(c)
        assert old.of("dismissed"), str(c)
        c.check(count=1)
        assert not c.redone(), str(c)


@pytest.mark.slow
def test_a_job_finishes_after_its_coordinator_is_killed_and_restarted(tmp_path: Path) -> None:
    with cluster(tmp_path, total=60, pace=0.03) as c:
        c.start(2)
        c.wait_for_step(5)
        c.kill_coordinator()
        c.wait_for_step(15)
        c.start_coordinator()
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=2)
        assert not c.redone(), str(c)
        (late,) = c.start(1)
        assert late.process.wait(30) == 0, str(c)
        assert "is done (step 60); `paceline restart" in late.of("dismissed")[0]["reason"], str(c)
