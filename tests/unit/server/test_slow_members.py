"""A member that computes for longer than the others is named, with the time that they lose; others are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from unit.server.watched_job import WatchedJob

from paceline_protocol import Counters, Progress
from paceline_protocol.coordinator import Heard

SLOW = "rank 2 (host-3) is slow: the others wait 0.6 s for it in each step"


def train(job: WatchedJob, computes: Sequence[float], seconds: float = 25, *, steps: bool = True) -> None:
    """Members compute for so many seconds in each step, and wait in a collective for the slowest of them."""
    took = max(computes)
    before = job.tally.counters_of(job.members[0]).operations
    for step in range(before + 1, before + round(seconds / took) + 1):
        job.now += took
        for member, own in zip(job.members, computes, strict=True):
            progress = Progress(step, job.now, False, step if steps else 0, job.now)
            waited = job.tally.counters_of(member).in_collectives + took - own
            job.do(Heard(member, progress, Counters(operations=step, in_collectives=waited)))


def slow(job: WatchedJob) -> str:
    return job.tally.reports.slow(job.state)


@pytest.mark.parametrize(
    ("computes", "text"),
    [
        ((0.2, 0.2, 0.8, 0.2), SLOW),
        ((0.2, 0.8), "rank 1 (host-2) is slow: the other waits 0.6 s for it in each step"),
        (
            (0.2, 0.8, 0.8, 0.2, 0.2),
            "rank 1 (host-2) and rank 2 (host-3) are slow: the others wait 0.6 s for them in each step",
        ),
        ((0.7, 0.7, 0.7, 0.8), ""),  # so small a difference is usual
        ((0.2, 0.8, 0.8, 0.8), ""),  # one that is fast makes the others not slow
        ((0.01, 0.01, 0.05, 0.01), ""),  # too short to matter
    ],
)
def test_members_that_compute_for_longer_than_most_are_slow(computes: Sequence[float], text: str) -> None:
    job = WatchedJob(len(computes))
    train(job, computes)
    assert slow(job) == text


def test_a_job_without_steps_counts_operations() -> None:
    job = WatchedJob(3)
    train(job, (0.2, 0.2, 0.8), steps=False)
    assert slow(job) == "rank 2 (host-3) is slow: the others wait 0.6 s for it in each operation"


def test_a_few_long_steps_make_no_member_slow() -> None:
    job = WatchedJob(3)
    train(job, (1.0, 1.0, 15.0), 60)
    assert slow(job) == ""
    train(job, (1.0, 1.0, 15.0), 15)
    assert slow(job) == "rank 2 (host-3) is slow: the others wait 14.0 s for it in each step"


def test_a_member_that_is_slow_no_longer_is_not_named() -> None:
    job = WatchedJob(4)
    train(job, (0.2, 0.2, 0.8, 0.2))
    assert slow(job) == SLOW
    train(job, (0.2, 0.2, 0.2, 0.2))
    assert slow(job) == ""


def test_a_new_generation_begins_without_slow_members() -> None:
    job = WatchedJob(4)
    train(job, (0.2, 0.2, 0.8, 0.2))
    job.kill(4)
    assert slow(job) == "", "nobody trains"
    job.stop(job.members[:3], 1)
    assert job.state.live is not None
    assert slow(job) == ""


def test_ranks_with_different_positions_in_a_replica_are_not_compared() -> None:
    """They compute different parts of the model, and wait for the ranks of other replicas with their own position."""
    job = WatchedJob(6)
    for number, member in enumerate(job.members):
        job.state.sessions[member].position = number % 2
    train(job, (0.8, 0.2) * 3)
    assert slow(job) == ""


def test_what_a_member_says_of_its_waits_is_bounded() -> None:
    job = WatchedJob(3)
    for step in range(1, 31):
        job.now += 0.5
        for member, waited in zip(job.members, (1e15, 1e15, 0.0), strict=True):
            counters = Counters(operations=step, in_collectives=waited * step)
            job.do(Heard(member, Progress(step, job.now, False, step, job.now), counters))
    assert slow(job) == "rank 2 (host-3) is slow: the others wait 0.5 s for it in each step"
