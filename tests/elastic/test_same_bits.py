"""Microbatches: through kills, joins, leaves and restarts each step has the bits of one undisturbed process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.elastic.faults import kill
from support.elastic.same_bits import BitsSoak, check_bits, come_and_go, find_the_one_that_flips, in_microbatches

pytestmark = pytest.mark.slow


def test_kills_joins_and_leaves_keep_the_bits(tmp_path: Path) -> None:
    come_and_go("mlp", tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("phase", ["in_word", "before_gate", "behind_gate"])
def test_a_retried_step_has_the_same_bits(phase: str, tmp_path: Path) -> None:
    with in_microbatches(tmp_path, "mlp", most=3, total=8) as c:
        c.start(3, [kill(at=phase, rank=2, step=3)])
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        assert check_bits(c, tmp_path, "mlp") == 8


def test_another_world_resumes_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    runs = {"checkpoint_dir": str(tmp_path / "runs"), "checkpoint_every": 1}
    with in_microbatches(tmp_path, "mlp", total=12, **runs) as c:
        c.start(4, stop_at=5)
        assert set(c.wait().values()) == {0}
        assert check_bits(c, tmp_path, "mlp") == 5
    (tmp_path / "again").mkdir()
    with in_microbatches(tmp_path / "again", "mlp", total=12, **runs) as c:
        c.start(3)
        assert set(c.wait().values()) == {0}
        assert min(event["step"] for trainer in c.trainers for event in trainer.of("applied")) > 1
        assert check_bits(c, tmp_path, "mlp") == 12


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"other_processor": True}, "processor (digest of what it computes) is "),
        ({"threads": "3"}, "number of threads is 3 here but 1 on rank 0"),
        ({"microbatches": 16}, "sampler parts is 16 here but 8 on rank 0"),
    ],
    ids=["another processor", "another number of threads", "other microbatches"],
)
def test_a_newcomer_that_would_compute_other_bits_is_refused(plan: dict[str, Any], words: str, tmp_path: Path) -> None:
    with in_microbatches(tmp_path, "mlp", total=30, pace=0.04) as c:
        c.start(2)
        c.wait_for_step(1)
        (odd,) = c.start(1, **plan)
        codes = c.wait()
        assert sorted(codes.values()) == [0, 0, 3], str(c)
        (error,) = odd.of("error")
        assert error["type"] == "SettingsMismatch"
        assert words in error["text"], str(c)
        assert not c.redone(), str(c)
        assert check_bits(c, tmp_path, "mlp") == 30


def test_a_newcomer_with_another_processor_is_admitted_without_same_bits(tmp_path: Path) -> None:
    with in_microbatches(tmp_path, "mlp", total=30, pace=0.04, same_bits=False) as c:
        c.start(2)
        c.wait_for_step(1)
        (odd,) = c.start(1, other_processor=True)
        assert set(c.wait().values()) == {0}, str(c)
        assert odd.of("applied"), str(c)


def test_a_worker_that_flips_a_bit_of_its_gradients_is_named(tmp_path: Path) -> None:
    find_the_one_that_flips("mlp", tmp_path)


def test_two_diverging_workers_are_both_named(tmp_path: Path) -> None:
    with in_microbatches(tmp_path, "mlp", least=2, most=2, total=8, check_every=3) as c:
        trainers = [*c.start(1, go=False), *c.start(1, go=False, flips_from=4)]
        for trainer in trainers:
            trainer.go()
        assert set(c.wait().values()) == {3}, str(c)
        errors = [trainer.of("error")[0] for trainer in trainers]
        assert [(error["type"], error["ranks"]) for error in errors] == [("DivergenceError", [0, 1])] * 2, str(c)
        assert max(event["step"] for trainer in trainers for event in trainer.of("applied")) == 5, str(c)


def test_200_checked_steps_report_no_divergence_and_keep_their_bits(tmp_path: Path) -> None:
    with in_microbatches(tmp_path, "mlp", most=3, total=200, check_every=1) as c:
        c.start(3, [kill(at="forward", rank=1, step=60)])
        assert sorted(c.wait(90).values()) == [-9, 0, 0], str(c)
        assert check_bits(c, tmp_path, "mlp") == 200


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
def test_a_30_second_soak_keeps_the_bits(tmp_path: Path) -> None:
    BitsSoak("mlp", 30, print).run(1, tmp_path)
