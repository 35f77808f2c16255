"""What a member counts: its counters never fall, and `session.stats()` returns them when it is alone, too."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
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
            "share": 0.0,
            "speed": 0.0,
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
        assert one._core.counters.waited == 0.0
        other.all_reduce([1.0])
        work.wait()
        assert other._core.counters.waited > 0.0
        part = other.subgroup([1])
        before = other._core.counters.waited
        part.barrier()
        assert other._core.counters.waited >= before, "a part counts for the whole"
        assert other._core.mesh.sent_bytes["local"] == other.bytes_sent > 0


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is moved by hand: its only number."""
    now = [100.0]
    monkeypatch.setattr("paceline._base.activity.monotonic", lambda: now[0])
    return now


def apply(counters: MemberCounters, clock: list[float], *steps: tuple[int, float, float]) -> float:
    """Steps of so many samples, seconds, and seconds of waiting; returns the speed after them."""
    for number, (samples, seconds, waited) in enumerate(steps, 1):
        counters.step_begins()
        clock[0] += seconds
        counters.add_wait(waited)
        counters.step_applied(number, samples)
    return counters.speed


def test_a_speed_is_the_median_of_steps_without_their_waits(clock: list[float]) -> None:
    counters = MemberCounters()
    warm = (10, 60.0, 0.0)  # the first step loads and compiles, and does not count
    assert apply(counters, clock, warm, (10, 2.0, 1.0), (10, 2.0, 1.0)) == 0.0, "too few steps"
    assert apply(counters, clock, (10, 2.0, 1.0)) == pytest.approx(10.0)
    assert apply(counters, clock, (20, 2.0, 1.0), (20, 2.0, 1.0)) == pytest.approx(10.0), "a median"
    assert apply(counters, clock, *[(20, 2.0, 1.0)] * 2) == pytest.approx(20.0)


def test_steps_without_samples_or_after_an_interruption_have_no_speed(clock: list[float]) -> None:
    counters = MemberCounters()
    apply(counters, clock, *[(10, 1.0, 0.0)] * 4)
    apply(counters, clock, (0, 100.0, 0.0), (0, 100.0, 0.0), (0, 100.0, 0.0))
    for interrupt in (counters.step_undone, counters.stopped):
        interrupt()
        apply(counters, clock, (10, 100.0, 0.0))
    assert counters.speed == pytest.approx(10.0)


def test_steps_between_skipped_ones_are_measured(clock: list[float]) -> None:
    counters = MemberCounters()
    for number in range(4):
        counters.step_skipped(2 * number + 1, 10)
        apply(counters, clock, (10, 1.0, 0.0))
    assert counters.speed == pytest.approx(10.0)


def test_short_steps_are_measured_together(clock: list[float]) -> None:
    counters = MemberCounters()
    short = [(2, 0.05, 0.0), (2, 0.05, 0.0), (2, 0.05, 0.025), (2, 0.07, 0.035)]  # 8 samples in 0.22 s, 0.06 s of waits
    assert apply(counters, clock, (2, 1.0, 0.0), *short, *short, *short[:3]) == 0.0, "two measurements"
    assert apply(counters, clock, *short[3:]) == pytest.approx(8 / 0.16)


def test_a_speed_is_new_until_it_was_told(clock: list[float]) -> None:
    counters, step = MemberCounters(), (10, 1.0, 0.0)
    apply(counters, clock, *[step] * 4)
    assert counters.new_speed == counters.speed == pytest.approx(10.0)
    counters.speed_told()
    apply(counters, clock, step, step)
    assert (counters.new_speed, counters.speed) == (0.0, pytest.approx(10.0))
    apply(counters, clock, step)
    assert counters.new_speed == pytest.approx(10.0)


def test_a_speed_outlives_a_generation(clock: list[float]) -> None:
    counters = MemberCounters()
    apply(counters, clock, *[(10, 1.0, 0.0)] * 4)
    counters.stopped()
    assert counters.speed == pytest.approx(10.0)
    assert counters.read({}).speed == pytest.approx(10.0)
    counters.forget_speeds()
    assert counters.speed == 0.0


def test_stats_have_the_speed_and_share_of_a_worker() -> None:
    with paceline.join() as session:
        Training().run(session, 8, after=lambda _: time.sleep(0.1))
        stats = session.stats()
    assert stats["share"] == 1.0
    assert 0.0 < stats["speed"] < float("inf")


def test_logged_values_are_in_the_stats() -> None:
    with paceline.join() as session:
        session.log(loss=np.float32(0.5), lr=0.1)
        session.log(loss=np.array([0.25]), **{"val/accuracy": 1})
        stats = session.stats()
        assert {name: stats[name] for name in stats if name.startswith("logged/")} == {
            "logged/loss": 0.25,
            "logged/lr": 0.1,
            "logged/val/accuracy": 1.0,
        }


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ({"loss": "low"}, TypeError, "loss is no number that can be logged, but str"),
        ({"loss": np.zeros(2)}, TypeError, "loss is no number that can be logged, but ndarray"),
        ({"n" * 65: 1.0}, ValueError, "has 1 to 64 bytes"),
        ({"a\nb": 1.0}, ValueError, "bytes to print"),
        ({f"n{number}": 1.0 for number in range(33)}, ValueError, "at most 32 names, not 33"),
    ],
)
def test_what_cannot_be_logged_is_refused(values: dict[str, float], kind: type[Exception], words: str) -> None:
    with paceline.join() as session:
        with pytest.raises(kind, match=words):
            session.log(**values)
        assert not any(name.startswith("logged/") for name in session.stats())
