"""In microbatches the bits of a run with FSDP2 inside follow from the size of a replica, not from their number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.command import command

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).parent / "replica_microbatches.py")


def digests(replicas: int, ranks: int, reshard_after_forward: str) -> set[str]:
    """The digests that all ranks print."""
    with command(
        "run", "-n", str(replicas * ranks), "--replica-size", str(ranks), SCRIPT, reshard_after_forward
    ) as run:
        assert run.wait(150.0) == 0, str(run)
    found = re.findall(rf"{replicas} replicas of {ranks}: (\w+)", run.stdout)
    assert len(found) == replicas * ranks, str(run)
    return set(found)


def test_one_and_two_replicas_end_with_the_same_bits() -> None:
    (alone,) = digests(1, 2, "True")
    assert digests(2, 2, "True") == {alone}


@pytest.mark.exhaustive
def test_fsdp2_that_keeps_weights_on_two_of_four_ranks_trains_in_replicas() -> None:
    (alone,) = digests(1, 4, "2")
    assert digests(2, 4, "2") == {alone}
