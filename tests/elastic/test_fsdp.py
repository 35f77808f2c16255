"""FSDP in real processes while workers die and come: what every rank has whole goes on, what is spread is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import kill

pytestmark = pytest.mark.slow


def test_one_of_three_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=6, wrapper="fsdp") as c:
        c.start(3, [kill(at="mid_all_reduce", rank=1, step=3)])
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, f"more than one step was redone\n{c}"


def test_one_joins_two(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=3, total=40, wrapper="fsdp", pace=0.05) as c:
        c.start(2)
        c.wait_for_step(2)
        (newcomer,) = c.start(1, model_seed=99)
        c.wait_until(lambda: bool(newcomer.of("applied")), "the newcomer applied a step")
        codes = c.wait()
        assert set(codes.values()) == {0}, str(c)
        assert newcomer.of("applied")[0]["step"] > 2
        c.check(count=3)
        assert not c.redone(), f"a join redoes nothing\n{c}"
