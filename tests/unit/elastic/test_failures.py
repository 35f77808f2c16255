"""A step that fails too often in a row ends in an error that has every cause."""

import pytest

from paceline.elastic.failures import MAX_ATTEMPTS, Failures
from paceline.errors import PeerLost, StepVoid


def test_attempts_at_one_step_are_counted() -> None:
    failures = Failures()
    assert failures.begin(4) == 1
    failures.add(4, PeerLost("rank 1 died"))
    assert failures.begin(4) == 2
    assert failures.begin(5) == 1, "the next step has failed never"
    assert failures.begin(4) == 1, "a line that goes on from before begins anew"


def test_once_too_often() -> None:
    failures = Failures()
    for number in range(MAX_ATTEMPTS - 1):
        failures.add(4, PeerLost(f"rank {number} died"))
    with pytest.raises(StepVoid, match=r"step 4 failed 5 times in a row: PeerLost: rank 0 died; .*ValueError: no"):
        failures.add(4, ValueError("no"))


def test_other_steps_do_not_add_up() -> None:
    failures = Failures()
    for step in range(2 * MAX_ATTEMPTS):
        failures.add(step, PeerLost("rank 1 died"))
