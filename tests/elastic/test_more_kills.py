"""SIGKILL while joining, giving and taking state, in a meeting, at the end; of several at once; of all."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elastic.lost import resumed_from

from paceline import checkpoint
from support.elastic.cluster import Cluster, Trainer, cluster
from support.elastic.faults import drain, kill

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("wrapper", "phase"),
    [
        *(("ddp", phase) for phase in ["joining", "taking", "forward", "mid_all_reduce"]),
        ("no_shard", "taking"),
        ("full_shard", "joining"),
    ],
)
@pytest.mark.sampled(2)
def test_members_train_on_after_a_newcomer_is_killed(wrapper: str, phase: str, tmp_path: Path) -> None:
    with cluster(tmp_path, total=30, pace=0.05, wrapper=wrapper) as c:
        c.start(2)
        c.wait_for_step(3)
        (newcomer,) = c.start(1, [kill(at=phase)], model_seed=99)
        assert newcomer.process.wait(30) == -signal.SIGKILL, str(c)
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 2, str(c)


def test_training_survives_a_donor_killed_while_giving_the_state(tmp_path: Path) -> None:
    with cluster(tmp_path, total=30, pace=0.05) as c:
        c.start(2, [kill(at="giving", once=tmp_path / "killed")])  # whichever of them the newcomer asks
        c.wait_for_step(2)
        c.start(1, model_seed=99)  # its state differs from theirs, so it must be given something
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0], str(c)
        c.check(count=2)


@pytest.mark.parametrize(("wrapper", "second"), [("ddp", 1), ("hybrid_shard", 2)])
def test_training_survives_a_member_killed_in_a_meeting(wrapper: str, second: int, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=4, total=8, wrapper=wrapper) as c:
        c.start(4, [kill(at="behind_gate", rank=3, step=3), kill(at="meeting", rank=second)])
        codes = c.wait()
        assert sorted(codes.values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)


@pytest.mark.parametrize(("wrapper", "world"), [("ddp", 3), ("hybrid_shard", 4)])
@pytest.mark.parametrize("phase", ["closing", "behind_gate"])
@pytest.mark.sampled(2)
def test_a_job_finishes_after_a_kill_at_its_last_step(phase: str, wrapper: str, world: int, tmp_path: Path) -> None:
    with cluster(tmp_path, most=world, total=6, wrapper=wrapper) as c:
        c.start(world, [kill(at=phase, rank=1, step=6 if phase == "behind_gate" else None)])
        codes = c.wait()
        assert list(codes.values()).count(-9) == 1, str(c)
        c.check()


def test_the_job_is_not_done_before_its_last_checkpoint_is_durable(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, total=6, checkpoint_dir=str(runs)) as c:
        c.start(3, [kill(at="keeping", rank=0, once=tmp_path / "once")])  # whoever is rank 0 then writes it
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        assert [tag.step for tag in checkpoint.tags(runs)] == [6], str(c)


def test_workers_with_different_checkpoints_of_one_tag_agree_on_one(tmp_path: Path) -> None:
    """Each was written in a run of its own, with a coordinator that knew nothing of the other."""
    disks = [tmp_path / name for name in ("a", "b")]
    for seed, disk in enumerate(disks):
        disk.mkdir()
        with cluster(disk, total=4, checkpoint_dir=str(disk / "runs"), model_seed=seed) as c:
            c.start(1)
            assert set(c.wait().values()) == {0}, str(c)
    assert len({str(checkpoint.tags(disk / "runs")) for disk in disks}) == 1
    with cluster(tmp_path, least=2, total=8) as c:
        started = [c.start(1, checkpoint_dir=str(disk / "runs"), go=False)[0] for disk in disks]
        for trainer in started:
            trainer.go()
        assert set(c.wait().values()) == {0}, str(c)
        assert len({trainer.of("done")[0]["digest"] for trainer in started}) == 1, str(c)
        assert {e["step"] for t in started for e in t.of("applied")} == {5, 6, 7, 8}, str(c)


def test_a_drain_of_all_saves_the_state_despite_a_killed_writer(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, most=3, total=500, checkpoint_dir=str(runs)) as c:
        c.start(3, [drain(at="forward", step=4), kill(at="keeping", rank=0, once=tmp_path / "once")])
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0], str(c)
        last = max(e["step"] for t in c.trainers for e in t.of("dismissed"))
        assert [tag.step for tag in checkpoint.tags(runs)] == [last], str(c)


@pytest.mark.parametrize("victims", [2, 3])
def test_survivors_train_on_after_several_kills_at_once(victims: int, tmp_path: Path) -> None:
    with cluster(tmp_path, most=4, total=12, pace=0.03) as c:
        with c.slowly():
            c.start(4)
            c.wait_for_step(4)
            c.kill_at_once(c.trainers[:victims])
        c.wait()
        c.check(count=4 - victims)
        assert sum(c.redone().values()) <= 1, str(c)


def test_one_of_two_nodes_trains_on_after_the_other_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=4, total=12, pace=0.03, wrapper="hybrid_shard") as c:
        with c.slowly():
            c.start(4)
            c.wait_for_step(4)
            c.kill_at_once(_of_ranks(c, 2, 3))
        assert sorted(c.wait().values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, str(c)


def test_survivors_resume_from_a_checkpoint_after_both_shard_copies_die(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, most=4, total=60, pace=0.03, wrapper="hybrid_shard", checkpoint_dir=str(runs),
                 checkpoint_every=2) as c:  # fmt: skip
        with c.slowly():
            c.start(4)
            c.wait_until(lambda: bool(checkpoint.tags(runs)), "a checkpoint is there")
            c.kill_at_once(_of_ranks(c, 1, 3))
        assert sorted(c.wait().values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)
        resumed_from(c)


@pytest.mark.parametrize("wrapper", ["ddp", "shard_grad_op", "hybrid_shard"])
@pytest.mark.sampled(3)
def test_new_workers_resume_from_a_checkpoint_after_all_are_killed(wrapper: str, tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoints")
    with cluster(tmp_path, least=2, total=40, pace=0.02, wrapper=wrapper, checkpoint_dir=where,
                 checkpoint_every=5) as c:  # fmt: skip
        with c.slowly():
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


def test_new_workers_begin_at_step_1_without_a_checkpoint(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=10, pace=0.02) as c:
        with c.slowly():
            c.start(2)
            c.wait_for_step(4)
            _kill_all(c)
        c.start(2)
        c.wait_until(lambda: len(c.finishers) == 2, "two finishers")
        assert min(event["step"] for t in c.trainers[2:] for event in t.of("applied")) == 1
        c.wait()
        c.check(count=2)
        for late in c.trainers[2:]:
            assert "no checkpoint was found: training began at step 1 again" in late.stderr, str(c)


def test_new_workers_on_the_host_notice_that_all_members_are_dead(tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoints")
    with cluster(tmp_path, least=2, total=40, pace=0.02, witness=False, checkpoint_dir=where, checkpoint_every=5) as c:
        with c.slowly():
            c.start(2)
            c.wait_until(lambda: bool(checkpoint.tags(where)), "a checkpoint is there")
            _kill_all(c)
        c.start(2, model_seed=77)
        c.wait_until(lambda: len(c.finishers) == 2, "two finishers")
        assert min(event["step"] for t in c.trainers[2:] for event in t.of("applied")) >= 6, str(c)
        c.wait()
        c.check(count=2)


def test_a_silent_member_is_named_and_an_operator_restarts_the_job(tmp_path: Path) -> None:
    with cluster(tmp_path, least=1, total=10, pace=0.02, failure_timeout=0.6) as c:
        with c.slowly():
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
        assert c.wait()[frozen.pid] == 0, str(c)  # all that it said is read then
        assert "is done" in frozen.of("dismissed")[0]["reason"], str(c)


def _of_ranks(c: Cluster, *ranks: int) -> list[Trainer]:
    return [trainer for trainer in c.trainers if trainer.of("attempt")[-1]["rank"] in ranks]


def _kill_all(c: Cluster) -> None:
    for trainer in c.trainers:
        trainer.signal(signal.SIGKILL)
    for trainer in c.trainers:
        trainer.process.wait(10)


def test_five_deaths_in_one_step_end_no_survivor(tmp_path: Path) -> None:
    """Spot machines are reclaimed one after the other: that says nothing about the step."""
    with cluster(tmp_path, total=4, pace=0.5) as c:
        living = c.start(7)
        for attempt in range(5):
            generation = 2 + attempt

            def in_the_step(generation: int = generation) -> bool:
                return all(any(e["generation"] == generation for e in t.of("attempt")) for t in living)

            c.wait_until(in_the_step, f"all try the step in generation {generation}")
            victim = living.pop()
            victim.signal(signal.SIGKILL)
            victim.process.wait()
        assert sorted(c.wait().values()) == [-signal.SIGKILL] * 5 + [0] * 2, str(c)
        c.check(count=2)
        assert any(e["step"] == 1 for t in living for e in t.of("undone")), str(c)
