"""Members of a sharded job die, and no part of the state goes with them: nobody has a checkpoint to go back to."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from elastic.lost import resumed_from

from support.elastic.cluster import Cluster, cluster
from support.elastic.faults import fail, kill

pytestmark = pytest.mark.slow

STRATEGIES = ["full_shard", "shard_grad_op"]


def of_rank(c: Cluster, rank: int) -> Any:
    """The trainer that has a rank in the newest generation."""
    newest = max(event["generation"] for trainer in c.trainers for event in trainer.of("view"))
    (found,) = [t for t in c.trainers if any((e["generation"], e["rank"]) == (newest, rank) for e in t.of("view"))]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("forward", 0),
        ("mid_all_gather", 1),
        ("mid_reduce_scatter", 2),
        ("before_gate", 3),
        ("second_word", 0),
        ("second_word", 2),
        ("behind_gate", 1),
        ("between_steps", 3),
    ],
)
@pytest.mark.sampled(4)
def test_survivors_train_on_after_one_of_four_is_killed(phase: str, rank: int, strategy: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=4, total=8, wrapper=strategy) as c:
        c.start(4, [kill(at=phase, rank=rank, step=4)])
        assert sorted(c.wait().values()) == [-9, 0, 0, 0], str(c)
        c.check(count=3)
        assert sum(c.redone().values()) <= 1, f"more than one step was redone\n{c}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sampled(1)
def test_two_kills_in_a_row_and_one_survivor_has_everything(strategy: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=1, most=3, total=400, wrapper=strategy, pace=0.02) as c:
        c.start(3)
        for rank in (1, 0):
            c.wait_for_step(max(e["step"] for t in c.trainers for e in t.of("applied")) + 3 if rank == 0 else 3)
            of_rank(c, rank).signal(signal.SIGKILL)
            size = 1 + rank
            c.wait_until(
                lambda size=size: any(e["size"] == size for t in c.trainers for e in t.of("view")), f"{size} go on"
            )
        assert sorted(c.wait().values()) == [-9, -9, 0], str(c)
        c.check(count=1)
        assert sum(c.redone().values()) <= 2, str(c)


def test_two_of_four_are_killed_at_once_and_each_shard_has_three_holders(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=4, total=40, wrapper="full_shard", redundancy=3, pace=0.02) as c:
        c.start(4)
        c.wait_for_step(4)
        c.kill_at_once([of_rank(c, rank) for rank in (1, 2)])
        assert sorted(c.wait().values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, str(c)


def test_a_newcomer_gets_copies_and_can_replace_any_other(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=3, total=400, wrapper="full_shard", pace=0.02) as c:
        c.start(2)
        c.wait_for_step(3)
        (newcomer,) = c.start(1, model_seed=99)
        c.wait_until(lambda: len(newcomer.of("applied")) > 2, "the newcomer trains")
        of_rank(c, 0).signal(signal.SIGKILL)
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, str(c)


@pytest.mark.parametrize("phase", ["taking_share", "giving_share"])
@pytest.mark.sampled(1)
def test_a_kill_while_shares_move_to_a_newcomer_loses_nothing(phase: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=4, total=60, wrapper="full_shard", pace=0.05) as c:
        c.start(3, [kill(at="giving_share", once=tmp_path / "killed")] if phase == "giving_share" else [])
        c.wait_for_step(3)
        faults = [kill(at="taking_share", once=tmp_path / "killed")] if phase == "taking_share" else []
        c.start(1, faults, model_seed=99)
        assert sorted(c.wait().values()) == [-9, 0, 0, 0], str(c)
        c.check(count=3)


def test_a_member_that_missed_the_second_word_finishes_its_copies_too(tmp_path: Path) -> None:
    through = tmp_path / "through"
    with cluster(tmp_path, least=1, most=3, total=300, wrapper="full_shard", log=True, pace=0.02) as c:
        trainers = c.start(2, [fail(at="second_word", until=through, rank=1, step=3)])
        c.wait_for_step(3)
        through.touch()
        c.wait_until(lambda: any("finished step 3 here too" in t.stderr for t in trainers), "one finishes step 3")
        (other,) = [t for t in trainers if "finished step 3 here too" not in t.stderr]
        c.wait_for_step(6)
        other.signal(signal.SIGKILL)
        assert sorted(c.wait().values()) == [-9, 0], str(c)
        c.check(count=1)


def test_the_loss_of_all_holders_of_a_shard_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, most=4, total=60, pace=0.03, wrapper="full_shard", checkpoint_dir=str(runs),
                 checkpoint_every=2) as c:  # fmt: skip
        with c.slowly():
            c.start(4)
            c.wait_until(lambda: any(runs.glob("g*")), "a checkpoint is there")
            c.kill_at_once([of_rank(c, rank) for rank in (0, 1)])
        assert sorted(c.wait().values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)
        resumed_from(c)
