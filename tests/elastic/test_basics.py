"""The heart of it in real processes, quick enough for every run: a death, a newcomer, a drain, no coordinator."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import kill


def test_a_member_dies_in_mid_all_reduce_and_the_others_go_on(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=3, total=6) as c:
        c.start(3, [kill(at="mid_all_reduce", rank=1, step=3)])
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, str(c)


def test_one_comes_and_another_is_drained_and_nothing_is_redone(tmp_path: Path) -> None:
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
def test_the_coordinator_dies_and_the_job_is_done_all_the_same(tmp_path: Path) -> None:
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
