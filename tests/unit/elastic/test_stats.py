"""What a member counts: its counters never fall, and `session.stats()` returns them when it is alone, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.elastic.solo import ENVIRONMENT, Training, fail, writing_at_once

import paceline
from paceline._base.activity import MemberCounters, counted_since
from paceline_protocol import Counters
from support.worlds import local_world


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)


def test_a_single_worker_counts_its_steps_and_samples() -> None:
    with paceline.join() as session:
        assert session.stats() == {
            "steps": 0,
            "undone": 0,
            "samples": 0,
            "skipped": 0,
            "skipped_samples": 0,
            "goodput": 0.0,
            "collective_seconds": 0.0,
            "sent_bytes": 0,
            "sent_bytes/shm": 0,
            "sent_bytes/tcp": 0,
            "sent_bytes/grpc": 0,
            "checkpoint_step": 0,
            "checkpoints": 0,
            "checkpoint_failures": 0,
            "checkpoint_seconds": 0.0,
            "state_bytes": 0,
            "state_seconds": 0.0,
            "generation": 1,
            "size": 1,
            "rank": 0,
        }
        Training().run(session, 5)
        stats = session.stats()
        assert (stats["steps"], stats["undone"]) == (5, 0)
        assert stats["samples"] == 4 + 4 + 2 + 4 + 4, "10 samples in batches of 4"
        assert 0.0 < stats["goodput"] <= 1.0
        assert session.stats()["goodput"] == stats["goodput"], "nothing is lost once all steps are done"


def test_an_undone_step_is_counted_but_its_samples_only_once() -> None:
    training = Training()
    with paceline.join() as session:

        def inside(step: paceline.Step) -> None:
            if step.number == 3 and step.attempt == 1:
                training.compute(step.indices)
                fail(session)
            training.train(step)

        training.run(session, 4, inside=inside)
        stats = session.stats()
    assert (stats["steps"], stats["undone"], stats["samples"]) == (4, 1, 14)
    assert stats["goodput"] < 1.0


def test_checkpoints_are_counted(tmp_path: Path) -> None:
    training = Training()
    with paceline.join() as session:
        training.run(writing_at_once(session), 5, checkpoint_dir=tmp_path, checkpoint_every=2)
        stats = session.stats()
    assert (stats["checkpoint_step"], stats["checkpoints"], stats["checkpoint_failures"]) == (5, 3, 0)
    assert stats["checkpoint_seconds"] > 0.0


def test_collective_seconds_count_the_waits_of_the_caller() -> None:
    with local_world(2) as (one, other):
        work = one.all_reduce([1.0], async_op=True)
        assert one.counters.waited == 0.0
        other.all_reduce([1.0])
        work.wait()
        assert other.counters.waited > 0.0
        part = other.subgroup([1])
        before = other.counters.waited
        part.barrier()
        assert other.counters.waited >= before, "a part counts for the whole"
        assert other.mesh.sent_bytes["local"] == other.bytes_sent > 0


def test_sent_bytes_never_fall_across_generations() -> None:
    counters = MemberCounters()
    assert counters.read({"shm": 10}).sent_bytes == {"shm": 10}
    assert counters.read({}).sent_bytes == {"shm": 10}, "the group has moved, and the old links are not added yet"
    counters.generation_ended({"shm": 10})
    assert counters.read({"shm": 10}).sent_bytes == {"shm": 20}
    counters.generation_ended({"shm": 12})
    assert counters.read({"tcp": 1}).sent_bytes == {"shm": 22, "tcp": 1}


def test_samples_are_counted_when_their_step_is_committed() -> None:
    counters = MemberCounters()
    counters.step_begins()
    counters.step_applied(3, 8)
    counters.step_committed(2)
    assert (counters.committed, counters.samples) == (1, 0)
    counters.step_committed(3)
    assert (counters.committed, counters.samples) == (2, 8)


def test_counters_of_a_rejoining_member_begin_at_zero() -> None:
    counters = MemberCounters()
    counters.committed, counters.waited = 7, 2.5
    before = counters.read({"shm": 10})
    assert counted_since(before, before) == Counters(sent_bytes={"shm": 0})
    counters.step_committed(8)
    assert counted_since(before, counters.read({"shm": 11})) == Counters(committed=1, sent_bytes={"shm": 1})


def test_checkpoint_counters_of_a_rejoining_member_begin_at_zero() -> None:
    counters = MemberCounters()
    counters.checkpoint_written(100, 0.5)
    counters.checkpoint_failed()
    before = counters.read({})
    assert (before.checkpoint_step, before.checkpoints, before.checkpoint_failures) == (100, 1, 1)
    assert counted_since(before, before) == Counters()
    counters.checkpoint_written(200, 0.25)
    assert counted_since(before, counters.read({})) == Counters(
        checkpoint_step=200, checkpoints=1, checkpoint_time=0.25
    )
