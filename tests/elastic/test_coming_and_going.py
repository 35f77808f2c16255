"""Workers come, are drained, break off, raise; the rest go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline import checkpoint
from support.elastic.cluster import cluster
from support.elastic.faults import abort, kill

pytestmark = pytest.mark.slow


def test_the_world_grows_to_four_shrinks_to_two_and_grows_again(tmp_path: Path) -> None:
    with cluster(tmp_path, total=150, pace=0.04) as c:
        c.start(1)
        c.wait_for_step(3)
        c.start(3)
        c.wait_until(lambda: any(e["size"] == 4 for t in c.trainers for e in t.of("view")), "four")
        for trainer in c.trainers[:2]:  # the first one too: rank 0 is nothing special
            trainer.signal(signal.SIGTERM)
        for trainer in c.trainers[:2]:
            assert trainer.process.wait(30) == 0, str(c)
            assert trainer.of("dismissed"), str(c)
        c.start(2)
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=4)
        assert not c.redone(), f"nobody failed, so nothing is redone\n{c}"


def test_a_newcomer_that_cannot_fetch_the_state_leaves(tmp_path: Path) -> None:
    with cluster(tmp_path, total=60, pace=0.04, failure_timeout=0.5) as c:
        c.start(2)
        c.wait_for_step(3)
        (late,) = c.start(1, takes_nothing=True)
        assert late.process.wait(30) == 3, str(c)
        (error,) = late.of("error")
        assert error["type"] == "LinkUnavailable"
        assert "could not fetch the state" in error["text"]
        assert set(c.wait().values()) == {0, 3}, str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, f"the step that began when it was to come\n{c}"


def test_every_member_of_a_sharded_job_can_be_replaced(tmp_path: Path) -> None:
    """Each holds a part of the state that nobody else has."""
    with cluster(tmp_path, total=150, pace=0.03, wrapper="full_shard") as c:
        first = c.start(3)
        c.wait_for_step(3)
        for old in first:
            (new,) = c.start(1)
            c.wait_until(lambda new=new: bool(new.of("applied")), "the new one trains")
            old.signal(signal.SIGTERM)
            assert old.process.wait(30) == 0, str(c)
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        assert not c.redone(), str(c)


def test_a_drained_spare_leaves_at_once(tmp_path: Path) -> None:
    """All are taken: it would wait until the job is done."""
    with cluster(tmp_path, least=2, most=2, total=300, pace=0.03) as c:
        members = c.start(2)
        c.wait_for_step(3)
        (spare,) = c.start(1)
        c.wait_until(lambda: bool(spare.of("joined")), "it waits")
        seen = max(e["step"] for e in members[0].of("applied"))
        c.wait_for_step(seen + 5)  # long enough to have shown that it can reach all
        spare.signal(signal.SIGTERM)
        assert spare.process.wait(30) == 0, str(c)
        assert spare.of("dismissed")[0]["reason"] == "SIGTERM", str(c)
        for member in members:
            member.signal(signal.SIGTERM)
        assert set(c.wait().values()) == {0}, str(c)
        assert not c.redone(), str(c)


@pytest.mark.parametrize("wrapper", ["ddp", "hybrid_shard"])
@pytest.mark.sampled(2)
def test_a_drain_of_all_members_saves_the_state(wrapper: str, tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoints")
    with cluster(tmp_path, least=2, total=60, pace=0.04, checkpoint_dir=where, wrapper=wrapper) as c:
        c.start(2)
        c.wait_for_step(5)
        for trainer in c.trainers:
            trainer.signal(signal.SIGTERM)
        for trainer in c.trainers:
            assert trainer.process.wait(30) == 0, str(c)
        last = max(t.of("dismissed")[0]["step"] for t in c.trainers)
        c.start(2, model_seed=99)
        c.wait()
        assert min(e["step"] for t in c.trainers[2:] for e in t.of("applied")) == last + 1, str(c)
        c.check(count=2)


def test_the_last_member_to_leave_writes_a_checkpoint(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, total=500, pace=0.02, checkpoint_dir=str(runs)) as c:
        c.start(2)
        c.wait_for_step(3)
        by_rank = {trainer.of("attempt")[0]["rank"]: trainer for trainer in c.trainers}
        by_rank[0].signal(signal.SIGTERM)
        assert by_rank[0].process.wait(20) == 0, str(c)
        assert not checkpoint.tags(runs), f"rank 1 holds the state, and waits for another worker\n{c}"
        by_rank[1].signal(signal.SIGTERM)
        assert by_rank[1].process.wait(20) == 0, str(c)
        assert [tag.step for tag in checkpoint.tags(runs)] == [by_rank[1].of("dismissed")[0]["step"]], str(c)


@pytest.mark.parametrize(("wrapper", "world"), [("ddp", 3), ("hybrid_shard", 4)])
def test_an_exception_on_one_rank_is_named_on_the_others(wrapper: str, world: int, tmp_path: Path) -> None:
    with cluster(tmp_path, most=world, total=8, wrapper=wrapper, barrier_in=4) as c:
        c.start(world, [abort(at="forward", rank=1, step=4)])
        codes = c.wait()
        assert sorted(codes.values()) == [0] * (world - 1) + [4], str(c)
        c.check(count=2)
        causes = [event["cause"] for t in c.trainers for event in t.of("undone")]
        assert any("rank 1" in cause and "ValueError" in cause for cause in causes), str(c)


def test_a_rank_may_leave_in_the_middle_of_its_loop(tmp_path: Path) -> None:
    with cluster(tmp_path, total=80, pace=0.03) as c:
        c.start(2)
        (other,) = c.start(1, leave_at=40)
        assert set(c.wait().values()) == {0}, str(c)
        ends = [trainer.of("done")[0]["step"] for trainer in c.trainers]
        assert ends == [80, 80, 40], str(c)
        assert other.of("applied")


def test_a_late_worker_of_a_finished_job_is_dismissed(tmp_path: Path) -> None:
    with cluster(tmp_path, total=5) as c:
        c.start(2)
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=2)
        c.kill_coordinator()
        c.start_coordinator()
        (late,) = c.start(1)
        assert late.process.wait(30) == 0, str(c)
        assert "is done (step 5); `paceline restart" in late.of("dismissed")[0]["reason"], str(c)
        assert not late.of("attempt")


@pytest.mark.parametrize(
    ("wrapper", "world"), [("ddp", 3), pytest.param("hybrid_shard", 4, marks=pytest.mark.exhaustive)]
)
def test_evaluation_between_steps_is_retried_after_a_kill(wrapper: str, world: int, tmp_path: Path) -> None:
    with cluster(tmp_path, total=120, pace=0.03, evaluate=True, wrapper=wrapper) as c:
        c.start(world)
        c.wait_for_step(5)
        c.trainers[1].signal(signal.SIGKILL)
        c.start(1)
        assert sorted(c.wait().values()) == [-9] + [0] * world, str(c)
        c.check(count=world)


def test_evaluation_survives_a_step_that_only_one_member_applied(tmp_path: Path) -> None:
    """Rank 1 dies when rank 2 has the sums of the step and rank 0 has not: 2 evaluates already, 0 takes its state."""
    with cluster(tmp_path, most=3, total=8, evaluate=True) as c:
        c.start(3, [kill(at="late_all_reduce", rank=1, step=3)])
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        c.check(count=2)


@pytest.mark.parametrize(
    ("plan", "words"),
    [({"batch": 7}, "sampler global_batch is 7 here but 11"), ({"total": 9}, "total is 9 here but 40")],
)
def test_a_newcomer_with_another_plan_is_refused(plan: dict[str, int], words: str, tmp_path: Path) -> None:
    with cluster(tmp_path, total=40, pace=0.05) as c:
        c.start(2)
        c.wait_for_step(3)
        (odd,) = c.start(1, **plan)
        assert odd.process.wait(30) == 3, str(c)
        assert words in odd.of("error")[0]["text"], str(c)
        c.wait()
        c.check(count=2)
        assert not c.redone(), str(c)
