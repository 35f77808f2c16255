"""A job of fixed size (min = max = n): whatever dies is replaced, and training goes on where it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.elastic.cluster import cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "dead", "claimed"),
    [(2, [1], False), (2, [1], True), (3, [0], False), (3, [1, 2], True), (4, [0, 1, 2], False), (4, [0, 1, 2], True)],
)
@pytest.mark.sampled(2)
def test_replacements_join_for_killed_members(world: int, dead: list[int], claimed: bool, tmp_path: Path) -> None:
    with cluster(tmp_path, least=world, most=world, total=40, pace=0.03) as c:
        first = c.start(world, ranks=range(world) if claimed else None)
        c.wait_for_step(3)
        for victim in dead:
            first[victim].signal(signal.SIGKILL)
            assert first[victim].process.wait(10) == -signal.SIGKILL
        c.start(len(dead), ranks=dead if claimed else None)
        assert sorted(c.wait().values()) == [-signal.SIGKILL] * len(dead) + [0] * world, str(c)
        c.check(count=world)


def test_a_member_killed_while_a_replacement_joins_is_replaced_too(tmp_path: Path) -> None:
    """The second dies while the first replacement still tries to reach it."""
    with cluster(tmp_path, least=3, most=3, total=40, pace=0.03) as c:
        first = c.start(3)
        c.wait_for_step(3)
        first[0].signal(signal.SIGKILL)
        (replacement,) = c.start(1)
        first[1].signal(signal.SIGKILL)
        c.wait_until(lambda: bool(replacement.of("joined")), "the replacement waits")
        c.start(1)
        assert sorted(c.wait().values()) == [-signal.SIGKILL] * 2 + [0] * 3, str(c)
        c.check(count=3)
