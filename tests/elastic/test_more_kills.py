"""SIGKILL while joining, giving and taking state, in a meeting, at the end; of several at once; of all."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline import checkpoint
from support.elastic.cluster import Cluster, Trainer, cluster
from support.elastic.faults import kill
from support.elastic.lost import resumed_from

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("wrapper", "phase"),
    [
        *(("ddp", phase) for phase in ["joining", "taking", "forward", "mid_all_reduce"]),
        ("no_shard", "taking"),
        ("full_shard", "joining"),
    ],
)
def test_a_newcomer_is_killed(wrapper: str, phase: str, tmp_path: Path) -> None:
    with cluster(tmp_path, total=30, pace=0.05, wrapper=wrapper) as c:
        c.start(2)
        c.wait_for_step(3)
        (newcomer,) = c.start(1, [kill(at=phase)], model_seed=99)
        assert newcomer.process.wait(30) == -signal.SIGKILL, str(c)
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 2, str(c)


def test_a_donor_is_killed_while_it_gives(tmp_path: Path) -> None:
    with cluster(tmp_path, total=30, pace=0.05) as c:
        c.start(2, [kill(at="giving", once=tmp_path / "killed")])  # whichever of them the newcomer asks
        c.wait_for_step(2)
        c.start(1, model_seed=99)  # its state differs from theirs, so it must be given something
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0], str(c)
        c.check(count=2)


@pytest.mark.parametrize(("wrapper", "second"), [("ddp", 1), ("hybrid_shard", 2)])
def test_a_member_is_killed_in_the_meeting(wrapper: str, second: int, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=8, wrapper=wrapper) as c:
        c.start(4, [kill(at="behind_gate", rank=3, step=3), kill(at="meeting", rank=second)])
        codes = c.wait()
        assert sorted(codes.values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)


@pytest.mark.parametrize(("wrapper", "world"), [("ddp", 3), ("hybrid_shard", 4)])
@pytest.mark.parametrize("phase", ["closing", "behind_gate"])
def test_a_member_is_killed_at_the_last_step(phase: str, wrapper: str, world: int, tmp_path: Path) -> None:
    with cluster(tmp_path, total=6, wrapper=wrapper) as c:
        c.start(world, [kill(at=phase, rank=1, step=6 if phase == "behind_gate" else None)])
        codes = c.wait()
        assert list(codes.values()).count(-9) == 1, str(c)
        c.check()


@pytest.mark.parametrize("victims", [2, 3])
def test_several_at_once(victims: int, tmp_path: Path) -> None:
    with cluster(tmp_path, total=12, pace=0.03) as c:
        c.start(4)
        c.wait_for_step(4)
        for trainer in c.trainers[:victims]:
            trainer.signal(signal.SIGKILL)
        c.wait()
        c.check(count=4 - victims)
        assert sum(c.redone().values()) <= 1, str(c)


def test_one_of_two_nodes_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=12, pace=0.03, wrapper="hybrid_shard") as c:
        c.start(4)
        c.wait_for_step(4)
        for trainer in _of_ranks(c, 2, 3):
            trainer.signal(signal.SIGKILL)
        assert sorted(c.wait().values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, str(c)


def test_both_are_killed_who_have_one_part(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, total=60, pace=0.03, wrapper="hybrid_shard", checkpoint_dir=str(runs),
                 checkpoint_every=2) as c:  # fmt: skip
        c.start(4)
        c.wait_until(lambda: bool(checkpoint.tags(runs)), "a checkpoint is there")
        for trainer in _of_ranks(c, 1, 3):
            trainer.signal(signal.SIGKILL)
        assert sorted(c.wait().values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)
        resumed_from(c)


@pytest.mark.parametrize("wrapper", ["ddp", "shard_grad_op", "hybrid_shard"])
def test_all_are_killed_and_start_again_from_the_checkpoint(wrapper: str, tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoints")
    with cluster(tmp_path, least=2, total=40, pace=0.02, wrapper=wrapper, checkpoint_dir=where,
                 checkpoint_every=5) as c:  # fmt: skip
        c.start(2)
        c.wait_until(lambda: bool(checkpoint.tags(where)), "a checkpoint is there")
        _kill_all(c)
        kept = {event["step"] for t in c.trainers for event in t.of("applied")}
        c.start(2, model_seed=77)
        c.wait_until(lambda: len(c.finishers) == 2, "two finishers")
        first = min(event["step"] for t in c.trainers[2:] for event in t.of("applied"))
        assert 6 <= first <= max(kept) + 1, str(c)
        c.wait()
        c.check(count=2)


def test_all_are_killed_and_there_is_no_checkpoint(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=10, pace=0.02) as c:
        c.start(2)
        c.wait_for_step(4)
        _kill_all(c)
        c.start(2)
        c.wait_until(lambda: len(c.finishers) == 2, "two finishers")
        assert min(event["step"] for t in c.trainers[2:] for event in t.of("applied")) == 1
        c.wait()
        c.check(count=2)


def test_all_are_killed_and_nobody_saw_it_but_their_host(tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoints")
    with cluster(tmp_path, least=2, total=40, pace=0.02, witness=False, checkpoint_dir=where, checkpoint_every=5) as c:
        c.start(2)
        c.wait_for_step(13)
        _kill_all(c)
        c.start(2, model_seed=77)
        c.wait_until(lambda: len(c.finishers) == 2, "two finishers")
        assert min(event["step"] for t in c.trainers[2:] for event in t.of("applied")) >= 6, str(c)
        c.wait()
        c.check(count=2)


def test_a_silent_member_is_named_and_the_operator_can_go_on(tmp_path: Path) -> None:
    with cluster(tmp_path, least=1, total=10, pace=0.02, failure_timeout=0.6) as c:
        (frozen,) = c.start(1)
        c.wait_for_step(4)
        frozen.signal(signal.SIGSTOP)  # for all that others know it may train on
        (late,) = c.start(1, log=True)
        c.wait_until(lambda: "paceline restart job" in late.stderr, "the way out is said")
        assert "rank 0" in late.stderr, str(c)
        assert not late.of("attempt"), str(c)
        c.restart_job()
        assert late.process.wait(30) == 0, str(c)
        c.check(count=1)
        frozen.signal(signal.SIGCONT)
        assert frozen.process.wait(30) == 0, str(c)
        assert "is done" in frozen.of("dismissed")[0]["reason"], str(c)


def _of_ranks(c: Cluster, *ranks: int) -> list[Trainer]:
    return [trainer for trainer in c.trainers if trainer.of("attempt")[-1]["rank"] in ranks]


def _kill_all(c: Cluster) -> None:
    for trainer in c.trainers:
        trainer.signal(signal.SIGKILL)
    for trainer in c.trainers:
        trainer.process.wait(10)
