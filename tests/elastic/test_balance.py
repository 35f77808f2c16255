"""Balanced shares among real workers: a slow one computes less, and the bits stay those of one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.elastic.cluster import Cluster, Trainer
from support.elastic.faults import kill
from support.elastic.same_bits import BitsSoak, check_bits, in_microbatches

pytestmark = pytest.mark.slow

FAST, SLOW = 0.01, 0.12
"""Seconds of a microbatch. On a busy machine each takes 0.05 s more."""


def computed(trainer: Trainer, first: int, last: int) -> Counter[int]:
    """How many steps the worker has begun with each number of microbatches."""
    told = [event for event in trainer.of("attempt") if first <= event["step"] <= last]
    return Counter(len(event["microbatches"]) for event in told)


def shares_by_step(c: Cluster) -> dict[int, list[int] | None]:
    """The shares of each step, on which all workers agree if they were in one generation."""
    found: dict[tuple[int, int], Any] = {}
    for trainer in c.trainers:
        for event in trainer.of("share"):
            key = (event["step"], event["generation"])
            assert found.setdefault(key, event["shares"]) == event["shares"], f"{key}\n{c}"
    return {step: found[step, generation] for step, generation in sorted(found)}


@pytest.mark.parametrize("model", ["mlp", "mlp/full_shard"])
def test_a_slow_worker_gets_fewer_microbatches(model: str, tmp_path: Path) -> None:
    with in_microbatches(tmp_path, model, microbatches=10, total=24, balance=True) as c:
        fast = c.start(1, go=False, microbatch_s=FAST)[0]
        slow = c.start(1, go=False, microbatch_s=SLOW)[0]
        for trainer in (fast, slow):
            trainer.go()
        assert set(c.wait().values()) == {0}, str(c)
        assert check_bits(c, tmp_path, "mlp", microbatches=10) == 24
    assert min(computed(fast, 18, 24)) > max(computed(slow, 18, 24)), str(c)
    assert shares_by_step(c)[1] is None, "they begin with equal shares"


def test_shares_are_found_again_after_a_kill_and_a_join(tmp_path: Path) -> None:
    """The third worker dies in step 16, and another one takes its place: each generation begins with equal shares."""
    plan = {"microbatches": 12, "total": 60, "balance": True, "most": 3, "check_every": 10}
    with in_microbatches(tmp_path, "mlp", **plan) as c:
        slow = c.start(1, go=False, microbatch_s=SLOW)[0]
        fast = c.start(1, go=False, microbatch_s=FAST)[0]
        lost = c.start(1, [kill(at="before_gate", step=16)], go=False, microbatch_s=FAST)[0]
        for trainer in (slow, fast, lost):
            trainer.go()
        c.wait_for_step(17, [fast])
        new = c.start(1, microbatch_s=FAST)[0]
        codes = c.wait(90)
        assert sorted(codes.values()) == [-9, 0, 0, 0], str(c)
        assert check_bits(c, tmp_path, "mlp", microbatches=12) == 60
    found = shares_by_step(c)
    assert len(found[15] or ()) == 3, f"three workers had unequal shares before one was killed\n{c}"
    assert max(computed(slow, 52, 60)) < 4, f"a third of 12\n{c}"
    assert max(computed(new, 52, 60)) > 4, str(c)


@pytest.mark.parametrize("least", [1, 2])
def test_a_straggler_is_named_and_leaves_if_enough_workers_stay(least: int, tmp_path: Path) -> None:
    """There is one microbatch for each, so none can move."""
    drains = {"PACELINE_DRAIN_STRAGGLERS": "1"}
    plan = {"least": least, "most": 2, "total": 24, "balance": True, "log": True, "microbatches": 2}
    with in_microbatches(tmp_path, "mlp", variables=drains, **plan) as c:
        fast = c.start(1, go=False, microbatch_s=0.0)[0]
        slow = c.start(1, go=False, microbatch_s=0.5)[0]
        for trainer in (fast, slow):
            trainer.go()
        assert set(c.wait(60).values()) == {0}, str(c)
        assert check_bits(c, tmp_path, "mlp", microbatches=2) == 24
    assert "is a straggler: " in fast.stderr, fast.stderr
    left = [event["reason"] for event in slow.of("dismissed")]
    assert left == (["this worker is a straggler"] if least == 1 else []), str(c)
    assert ("It stays, because too few workers would be left" in fast.stderr) == (least == 2), fast.stderr
    assert fast.of("done"), str(c)


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", ["mlp", "mlp/full_shard"])
def test_a_30_second_soak_with_balanced_shares_keeps_the_bits(model: str, tmp_path: Path) -> None:
    soak = BitsSoak(model, 30, print, balance=True)
    soak.run(1, tmp_path)
    assert soak.counts["steps with unequal shares"], soak.counts
