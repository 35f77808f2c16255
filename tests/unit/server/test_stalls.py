"""A job that hangs says for how long, and for whom its members wait; one that is only slow does not."""

from __future__ import annotations

from typing import Any

import pytest
from unit.server.watched_job import WatchedJob

from paceline_protocol import Counters, Progress
from paceline_protocol.coordinator import Heard
from paceline_server.stalls import LEAST_S


def hear(job: WatchedJob, operations: dict[int, int], *, inside: bool = True, **counters: Any) -> None:
    """Members tell which collective they are at, by number."""
    for number, operation in operations.items():
        progress = Progress(operation, job.now, inside and operation > 0, doing="all_reduce")
        job.do(Heard(job.members[number], progress, Counters(**counters)))


def beat(job: WatchedJob, operations: dict[int, int], seconds: float) -> None:
    """Members say the same for some seconds."""
    for _ in range(round(seconds / 0.5)):
        job.now += 0.5
        hear(job, operations)


def stall(job: WatchedJob) -> tuple[float, str] | None:
    return job.tally.stall(job.now, job.state)


def test_a_rank_that_does_not_enter_a_collective_stalls_the_job() -> None:
    job = WatchedJob(3)
    hear(job, {0: 200, 1: 199, 2: 200})
    beat(job, {0: 200, 1: 199, 2: 200}, LEAST_S - 0.5)
    assert stall(job) is None
    beat(job, {0: 200, 1: 199, 2: 200}, 3.5)
    assert stall(job) == (LEAST_S + 3, "rank 1 (host-2) has not entered all_reduce 200")
    beat(job, {0: 201, 1: 201, 2: 201}, 0.5)
    assert stall(job) is None


def test_a_silent_rank_is_named_first() -> None:
    job = WatchedJob(3)
    hear(job, {0: 200, 1: 200, 2: 199})
    beat(job, {0: 200, 2: 199}, 3)
    found = stall(job)
    assert found is not None
    assert found[1] == "rank 1 (host-2) does not answer, others are in all_reduce 200"


def test_ranks_that_are_all_inside_are_counted() -> None:
    job = WatchedJob(4)
    beat(job, dict.fromkeys(range(4), 7), 5)
    found = stall(job)
    assert found is not None
    assert found[1] == "all 4 workers are in all_reduce 7"


def test_of_many_late_ranks_two_are_named() -> None:
    job = WatchedJob(6)
    beat(job, {0: 2} | dict.fromkeys(range(1, 6), 1), 5)
    found = stall(job)
    assert found is not None
    assert found[1] == "rank 1 (host-2), rank 2 (host-3) and 3 more have not entered all_reduce 2"


def test_members_that_only_compute_do_not_stall() -> None:
    job = WatchedJob(2)
    for _ in range(20):
        job.now += 0.5
        hear(job, {0: 5, 1: 5}, inside=False)
    assert stall(job) is None


def test_steps_that_take_long_in_this_job_are_no_stall() -> None:
    job = WatchedJob(2)
    for number in range(1, 6):  # rank 1 takes 4 s for each, and rank 0 waits for it
        beat(job, {0: number, 1: number - 1}, 4)
        hear(job, {0: number, 1: number})
        assert number < 2 or stall(job) is None
    beat(job, {0: 6, 1: 5}, 11)
    assert stall(job) is None
    beat(job, {0: 6, 1: 5}, 3)
    assert stall(job) is not None


def test_a_job_without_a_live_view_is_not_stalled() -> None:
    job = WatchedJob(2)
    beat(job, {0: 2, 1: 1}, 5)
    assert stall(job) is not None
    job.kill(2)
    job.pass_time(1)
    assert job.state.live is None
    assert stall(job) is None


def test_collectives_count_once_and_go_on_in_the_next_generation() -> None:
    job = WatchedJob(3)
    for number in range(1, 11):
        job.now += 0.5
        hear(job, dict.fromkeys(range(3), number))
    assert job.tally.operations == 10
    assert job.tally.operations_per_second(job.now) == pytest.approx(2.0, rel=0.2)
    hear(job, {0: 3})  # its numbers begin anew
    assert job.tally.operations == 13


def test_logged_values_are_means_over_the_members_that_log_them() -> None:
    job = WatchedJob(3)
    hear(job, {0: 1}, logged={"loss": 1.0, "lr": 0.1})
    hear(job, {1: 1}, logged={"loss": 3.0}, total=500)
    hear(job, {2: 1})
    assert job.tally.logged() == {"loss": 2.0, "lr": 0.1}
    assert job.tally.total == 500
    assert job.tally.history.columns["logged/loss"][-1] in (1.0, 2.0)
