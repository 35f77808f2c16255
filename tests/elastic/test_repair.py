"""Repair: after a death in the middle of a step only what was lost is computed again, and the bits stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.elastic.cluster import Cluster, Trainer
from support.elastic.faults import Fault, freeze, kill
from support.elastic.same_bits import check_bits, in_microbatches

pytestmark = pytest.mark.slow

V, STEP = 16, 3


def computed(trainers: Sequence[Trainer], step: int = STEP) -> Counter[int]:
    """How often each microbatch of a step was computed by these workers, in all attempts."""
    told = [event for trainer in trainers for event in trainer.of("microbatch")]
    return Counter(event["microbatch"] for event in told if event["step"] == step and not event["is_check"])


def survivors(c: Cluster) -> list[Trainer]:
    """The workers that were not killed."""
    return [trainer for trainer in c.trainers if trainer.process.poll() == 0]


def run(folder: Path, faults: list[Fault], *, model: str = "mlp", world: int = 4, **plan: Any) -> Cluster:
    """Trains with faults; each step must have the bits of one process."""
    plan = {"total": 6, "microbatches": V, "tells_microbatches": True, "most": world, **plan}
    with in_microbatches(folder, model, **plan) as c:
        c.start(world, faults)
        codes = c.wait(90)
        kills = sum(fault.what == "kill" for fault in faults)
        assert sorted(codes.values()) == [-9] * kills + [0] * (world - kills), str(c)
        assert check_bits(c, folder, model, microbatches=plan["microbatches"]) == plan["total"]
    return c


@pytest.mark.parametrize(("microbatch", "bare"), [(8, False), (9, True), (10, False), (11, True)])
def test_survivors_compute_each_microbatch_once_after_a_kill(microbatch: int, bare: bool, tmp_path: Path) -> None:
    """Whenever rank 2 of 4 dies: those that live compute each microbatch once, so they lose nothing of their own.

    The training state may have the wrapper, or the bare module.
    """
    c = run(tmp_path, [kill(at="forward", rank=2, step=STEP)], fault_in_microbatch=microbatch, pace=0.2, bare=bare)
    assert computed(survivors(c)) == Counter(range(V)), str(c)


@pytest.mark.parametrize(("phase", "bare"), [("in_word", False), ("early_sum", True), ("late_sum", False)])
def test_survivors_compute_each_microbatch_once_after_a_late_kill(phase: str, bare: bool, tmp_path: Path) -> None:
    """All are in their last microbatch, and some have sums of all microbatches already."""
    c = run(tmp_path, [kill(at=phase, rank=1, step=STEP)], bare=bare)
    assert computed(survivors(c)) == Counter(range(V)), str(c)


def test_a_kill_behind_the_gate_recomputes_no_microbatch(tmp_path: Path) -> None:
    c = run(tmp_path, [kill(at="behind_gate", rank=2, step=STEP)])
    assert all(count == 1 for count in computed(survivors(c)).values()), str(c)


def test_the_last_survivors_compute_each_microbatch_once_after_two_kills(tmp_path: Path) -> None:
    """The second worker dies in the repaired attempt: what was kept before is kept again."""
    second = kill(at="repairing", rank=0, once=tmp_path / "second")
    c = run(tmp_path, [kill(at="forward", rank=3, step=STEP), second], barrier_in=STEP)
    assert computed(survivors(c)) == Counter(range(V)), str(c)


def test_with_one_microbatch_per_worker_all_are_computed_again(tmp_path: Path) -> None:
    """Before a worker's first microbatch is whole it is not known which wrappers are in a microbatch."""
    c = run(tmp_path, [kill(at="late_sum", rank=1, step=STEP)], world=3, microbatches=3)
    assert computed(survivors(c)) == Counter([0, 2, 0, 1, 2]), str(c)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_wrapper_used_in_some_steps_only_keeps_the_bits(microbatches: int, tmp_path: Path) -> None:
    """Its buckets still hold the sums of the step before the last."""
    run(tmp_path, [kill(at="forward", rank=1, step=6)], model="two", world=2, microbatches=microbatches, total=8)


def test_a_script_that_rewraps_its_module_repeats_the_entire_step(tmp_path: Path) -> None:
    c = run(
        tmp_path, [kill(at="forward", rank=1, step=STEP)], model="wraps-anew", world=3, microbatches=8, barrier_in=STEP
    )
    assert max(computed(survivors(c)).values()) == 2, str(c)


def test_microbatches_may_be_read_on_one_rank_only(tmp_path: Path) -> None:
    """The exchange of what ranks have kept is no collective at the place where a script reads the microbatches."""
    run(tmp_path, [kill(at="forward", rank=1, step=STEP)], world=3, microbatches=8, looks_early=True)


def test_three_workers_repair_subtrees_of_different_sizes(tmp_path: Path) -> None:
    c = run(tmp_path, [kill(at="forward", rank=1, step=STEP)], world=3, microbatches=8, pace=0.1)
    assert computed(survivors(c)) == Counter(range(8)), str(c)


def test_the_last_survivor_computes_the_remaining_microbatches(tmp_path: Path) -> None:
    c = run(tmp_path, [kill(at="forward", rank=0, step=STEP)], world=2, microbatches=8, pace=0.1)
    assert computed(survivors(c)) == Counter(range(8)), str(c)


def test_a_frozen_worker_rejoins_after_a_repair(tmp_path: Path) -> None:
    plan = {"total": 20, "microbatches": V, "tells_microbatches": True, "most": 4, "failure_timeout": 1.0, "pace": 0.2}
    with in_microbatches(tmp_path, "mlp", **plan) as c:
        c.start(4, [freeze(at="forward", rank=2, step=STEP)])
        c.wait_until(lambda: any(t.of("undone") for t in c.trainers), "the others have given it up")
        (frozen,) = [trainer for trainer in c.trainers if trainer.of("fault")]
        frozen.thaw()
        assert set(c.wait(90).values()) == {0}, str(c)
        assert check_bits(c, tmp_path, "mlp", microbatches=V) == 20
        assert frozen.of("applied")[-1]["step"] == 20, str(c)
        others = [trainer for trainer in c.trainers if trainer is not frozen]
        assert computed(others) == Counter(range(V)), str(c)


def test_a_newcomer_may_join_in_the_repaired_step(tmp_path: Path) -> None:
    with in_microbatches(tmp_path, "mlp", total=8, microbatches=V, tells_microbatches=True, pace=1.0) as c:
        first = c.start(3, [kill(at="forward", rank=1, step=STEP)])
        c.wait_for_step(STEP - 1)
        c.start(2)
        assert sorted(c.wait(90).values()) == [-9, 0, 0, 0, 0], str(c)
        assert check_bits(c, tmp_path, "mlp", microbatches=V) == 8
        assert max(computed([trainer for trainer in first if trainer.process.poll() == 0]).values()) == 1, str(c)


def test_checked_steps_are_computed_again_after_a_kill(tmp_path: Path) -> None:
    """A microbatch that is computed twice is digested whole, so nothing is kept in its step."""
    c = run(tmp_path, [kill(at="forward", rank=2, step=STEP)], barrier_in=STEP, check_every=1)
    assert max(computed(survivors(c)).values()) == 2, str(c)


def test_a_worker_that_sends_bad_rows_is_evicted(tmp_path: Path) -> None:
    """It comes back once; after the second time the coordinator does not take it any more."""
    with in_microbatches(tmp_path, "mlp", total=30, microbatches=8, pace=0.1) as c:
        sound = c.start(2, go=False)
        (odd,) = c.start(1, bad_rows=True, go=False)
        for trainer in c.trainers:
            trainer.go()
        with c.slowly():
            odd.process.wait(60)
        codes = c.wait(90)
        assert [codes[trainer.pid] for trainer in (*sound, odd)] == [0, 0, 3], str(c)
        assert check_bits(c, tmp_path, "mlp", microbatches=8) == 30
        error = odd.of("error")[0]
        assert error["type"] == "PeerBrokeProtocol", str(c)
        assert "because it broke the protocol, and does not take it any more" in error["text"], str(c)
