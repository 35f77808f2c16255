"""What the soak looks for is seen when it is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.elastic.afterwards import check_commits, undone_generations


def _told(*events: tuple[str, int, int]) -> Any:
    """A job with one trainer that told (event, generation, step)."""
    rows = [{"event": kind, "generation": generation, "step": step, "cause": "?"} for kind, generation, step in events]
    trainer = SimpleNamespace(pid=1, events=rows, of=lambda kind: [row for row in rows if row["event"] == kind])
    return SimpleNamespace(trainers=[trainer])


def test_a_repeated_committed_step_is_detected() -> None:
    check_commits(_told(("attempt", 1, 4), ("attempt", 1, 5), ("committed", 0, 4), ("attempt", 2, 5)))
    with pytest.raises(AssertionError, match="step 4 was committed in generation 1"):
        check_commits(_told(("attempt", 1, 4), ("attempt", 1, 5), ("committed", 0, 4), ("attempt", 2, 4)))


def test_two_lost_steps_of_one_generation_are_detected() -> None:
    assert list(undone_generations(_told(("undone", 1, 5), ("undone", 2, 5)))) == [1, 2]
    with pytest.raises(AssertionError, match=r"the steps \[5, 6\] of generation 1"):
        undone_generations(_told(("undone", 1, 5), ("undone", 1, 6)))
