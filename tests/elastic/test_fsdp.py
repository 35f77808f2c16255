"""FSDP in real processes while workers come, go and die: weights are those of one process, whatever is spread."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elastic.lost import resumed_from

from support.elastic.cluster import cluster
from support.elastic.faults import fail, kill

pytestmark = pytest.mark.slow

SPREADING = ["full_shard", "shard_grad_op", "hybrid_shard"]
ALL = ["no_shard", *SPREADING]


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
@pytest.mark.sampled(2)
def test_two_newcomers_join_two_members(tmp_path: Path, strategy: str) -> None:
    with cluster(tmp_path, least=2, most=4, total=30, wrapper=strategy, pace=0.05) as c:
        c.start(2)
        c.wait_for_step(2)
        newcomers = c.start(2, model_seed=99)
        c.wait_until(lambda: all(newcomer.of("applied") for newcomer in newcomers), "the newcomers applied a step")
        codes = c.wait()
        assert set(codes.values()) == {0}, str(c)
        c.check(count=4)
        assert not c.redone(), f"a join redoes nothing\n{c}"


@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op"])
@pytest.mark.sampled(2)
def test_two_of_four_members_are_drained(tmp_path: Path, strategy: str) -> None:
    with cluster(tmp_path, least=2, most=4, total=60, wrapper=strategy, pace=0.05) as c:
        trainers = c.start(4)
        c.wait_for_step(3)
        for trainer in trainers[1:3]:
            trainer.signal(signal.SIGTERM)
        codes = c.wait()
        assert set(codes.values()) == {0}, str(c)
        c.check(count=2)
        assert not c.redone(), f"a drain redoes nothing\n{c}"


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_a_member_that_missed_the_second_word_finishes_the_step(tmp_path: Path, strategy: str) -> None:
    through = tmp_path / "through"
    with cluster(tmp_path, least=2, total=6, wrapper=strategy, log=True) as c:
        c.start(2, [fail(at="second_word", until=through, rank=1, step=3)])
        c.wait_for_step(3)
        through.touch()
        codes = c.wait()
        assert set(codes.values()) == {0}, str(c)
        c.check(count=2)
        (applied,) = [t for t in c.trainers if any((e["step"], e["generation"]) == (3, 2) for e in t.of("applied"))]
        (other,) = [t for t in c.trainers if t is not applied]
        assert [e["step"] for e in other.of("undone")] == [3], str(c)
        assert "finished step 3 here too" in other.stderr
        assert c.line()[3] == 2, f"step 3 was taken twice\n{c}"


@pytest.mark.parametrize(
    ("at", "rank"), [("second_word", 0), ("second_word", 3), ("behind_gate", 1), ("behind_gate", 2)]
)
@pytest.mark.sampled(2)
def test_survivors_train_on_after_a_kill_around_the_second_word(tmp_path: Path, at: str, rank: int) -> None:
    with cluster(tmp_path, least=2, most=4, total=6, wrapper="hybrid_shard") as c:
        c.start(4, [kill(at=at, rank=rank, step=3)])
        assert sorted(c.wait().values()) == [-9, 0, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, f"more than one step was redone\n{c}"


def test_survivors_train_on_after_a_kill_at_the_first_share(tmp_path: Path) -> None:
    """Before the first step everybody has all of the state, and who is left goes on."""
    with cluster(tmp_path, least=2, most=4, total=6, wrapper="hybrid_shard") as c:
        c.start(4, [kill(at="taking_share", once=tmp_path / "killed")])
        assert sorted(c.wait().values()) == [-9, 0, 0, 0], str(c)
        c.check(count=2)


def test_survivors_train_on_after_a_kill_while_giving_a_share(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=6, total=60, wrapper="hybrid_shard", pace=0.05) as c:
        c.start(4, [kill(at="giving_share", once=tmp_path / "killed")])
        c.wait_for_step(3)
        c.start(2, model_seed=99)
        assert sorted(c.wait().values()) == [-9, 0, 0, 0, 0, 0], str(c)
        c.check(count=4)


@pytest.mark.parametrize(("strategy", "rest"), [("full_shard", 3), ("hybrid_shard", 2)])
@pytest.mark.sampled(2)
def test_members_train_on_after_a_newcomer_with_a_share_is_killed(tmp_path: Path, strategy: str, rest: int) -> None:
    with cluster(tmp_path, least=2, most=4, total=30, wrapper=strategy, pace=0.05) as c:
        c.start(2)
        c.wait_for_step(3)
        c.start(2, [kill(at="taking_share", once=tmp_path / "killed")], model_seed=99)
        assert sorted(c.wait().values()) == [-9, 0, 0, 0], str(c)
        c.check(count=rest)
        assert not c.redone(), f"it was not yet in the line\n{c}"


def test_a_member_is_drained_while_another_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=4, total=60, wrapper="hybrid_shard", pace=0.05) as c:
        c.start(4)
        c.wait_for_step(3)
        trainers = sorted(c.trainers, key=lambda trainer: trainer.of("attempt")[0]["rank"])
        trainers[1].signal(signal.SIGTERM)
        trainers[2].signal(signal.SIGKILL)
        assert sorted(c.wait().values()) == [-9, 0, 0, 0], str(c)
        c.check(count=2)


def test_a_drain_of_all_members_saves_the_state_despite_a_kill(tmp_path: Path) -> None:
    """The generation that is over can write nothing together; so there is one more."""
    where = str(tmp_path / "checkpoints")
    with cluster(tmp_path, least=2, most=4, total=60, wrapper="hybrid_shard", pace=0.05, checkpoint_dir=where) as c:
        first, *others = c.start(4)
        c.wait_for_step(5)
        first.signal(signal.SIGKILL)
        for trainer in others:
            trainer.signal(signal.SIGTERM)
        assert sorted(c.wait().values()) == [-9, 0, 0, 0], str(c)
        last = max(e["step"] for t in c.trainers for e in t.of("applied"))
        again = c.start(2, model_seed=99)
        codes = c.wait()
        assert [codes[trainer.pid] for trainer in again] == [0, 0], str(c)
        assert min((e["step"] for t in again for e in t.of("applied")), default=None) == last + 1, str(c)
        c.check(count=2)


def test_a_spare_joins_together_with_a_newcomer(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=4, total=40, wrapper="hybrid_shard", pace=0.05) as c:
        c.start(4, [kill(at="mid_all_reduce", rank=1, step=3)])
        c.wait_until(lambda: any(e["size"] == 2 for t in c.trainers for e in t.of("view")), "two go on")
        (newcomer,) = c.start(1)
        c.wait_until(lambda: bool(newcomer.of("applied")), "the newcomer applied a step")
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0, 0, 0], str(c)
        c.check(count=4)


def test_a_lost_state_is_read_from_the_last_checkpoint(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, most=3, total=60, pace=0.02, wrapper="full_shard", redundancy=1,
                 checkpoint_dir=str(runs), checkpoint_every=50) as c:  # fmt: skip
        c.start(3, [kill(at="before_gate", rank=1, once=tmp_path / "killed", stored=runs)])
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        assert resumed_from(c) == 50
        (lost,) = {line for t in c.finishers for line in t.stderr.splitlines() if "state is lost" in line}
        assert "part 1 of 3" in lost, lost


def test_a_lost_state_without_a_checkpoint_raises_orphaned_error(tmp_path: Path) -> None:
    with cluster(tmp_path, least=1, most=2, total=9, wrapper="full_shard") as c:
        c.start(2, [kill(at="before_gate", rank=1, step=3)])
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 3], str(c)
        (error,) = [e for t in c.trainers for e in t.of("error")]
        assert error["type"] == "OrphanedError"
        assert "part 1 of 2" in error["text"]
        assert "there is no checkpoint" in error["text"]
