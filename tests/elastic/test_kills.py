"""SIGKILL of a worker at every phase: the others go on, nothing is lost, nothing is used twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import kill

pytestmark = pytest.mark.slow

PHASES = ["forward", "in_word", "mid_all_reduce", "late_all_reduce", "before_gate", "behind_gate", "between_steps"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 2])
def test_one_of_four_is_killed(phase: str, rank: int, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=6) as c:
        c.start(4, [kill(at=phase, rank=rank, step=3)])
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0, 0], str(c)
        c.check(count=3)
        assert sum(c.redone().values()) <= 1, f"more than one step was redone\n{c}"
