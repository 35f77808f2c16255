"""A job that hangs says for how long, and for whom its members wait; one that is only slow does not."""

from __future__ import annotations

from typing import Any

import pytest
from unit.server.watched_job import WatchedJob

from paceline_protocol import Counters, Progress
from paceline_protocol.coordinator import FinishedLine, Heard
from paceline_server.stalls import FIRST_S, LEAST_S
from paceline_server.tally import Tally


def hear(job: WatchedJob, at: dict[int, int], *, inside: bool = True, **counters: Any) -> None:
    """Members tell which collective they are at, by number."""
    for number, operation in at.items():
        progress = Progress(operation, job.now, inside and operation > 0, doing="all_reduce")
        counted = {"operations": operation} | counters
        job.do(Heard(job.members[number], progress, Counters(**counted)))


def beat(job: WatchedJob, operations: dict[int, int], seconds: float) -> None:
    """Members say the same for some seconds."""
    for _ in range(round(seconds / 0.5)):
        job.now += 0.5
        hear(job, operations)


def run_fast(job: WatchedJob, world: int, until: int = 20) -> None:
    """All members get further with each heartbeat."""
    for number in range(1, until + 1):
        beat(job, dict.fromkeys(range(world), number), 0.5)


def stall(job: WatchedJob) -> tuple[float, str] | None:
    return job.tally.reports.stall(job.now, job.state)


def sentence(job: WatchedJob) -> str:
    found = stall(job)
    assert found is not None
    return found[1]


def test_a_rank_that_does_not_enter_a_collective_stalls_the_job() -> None:
    job = WatchedJob(3)
    run_fast(job, 3, 199)
    late = {0: 200, 1: 199, 2: 200}
    beat(job, late, LEAST_S)
    assert stall(job) is None
    beat(job, late, 3.5)
    assert stall(job) == (LEAST_S + 3, "rank 1 (host-2) has not entered all_reduce 200")
    beat(job, {0: 201, 1: 201, 2: 201}, 0.5)
    assert stall(job) is None


def test_before_the_first_collective_a_job_has_more_time() -> None:
    job = WatchedJob(2)
    beat(job, {0: 1}, FIRST_S)
    assert stall(job) is None
    beat(job, {0: 1}, 1)
    assert sentence(job) == "rank 1 (host-2) does not answer, others are in all_reduce 1"


def test_a_silent_rank_is_named_first() -> None:
    job = WatchedJob(3)
    run_fast(job, 3, 199)
    hear(job, {0: 200, 1: 200, 2: 199})
    beat(job, {0: 200, 2: 199}, 3)
    assert sentence(job) == "rank 1 (host-2) does not answer, others are in all_reduce 200"


@pytest.mark.parametrize("timeout", [3.0, 30.0])
def test_members_that_are_heard_of_rarely_are_not_silent(timeout: float) -> None:
    """Each is heard of six times in a failure timeout."""
    job = WatchedJob(4, failure_timeout=timeout)
    interval = timeout / 6
    for number in range(1, 6):
        for member in range(4):
            job.now += interval / 4
            hear(job, {member: number})
    for _ in range(8):
        for member in range(4):
            job.now += interval / 4
            hear(job, {member: 5 if member == 3 else 6})
            found = stall(job)
            assert found is None or found[1] == "rank 3 (host-4) has not entered all_reduce 6"
    assert stall(job) is not None


def test_ranks_that_are_all_inside_are_counted() -> None:
    job = WatchedJob(4)
    run_fast(job, 4)
    beat(job, dict.fromkeys(range(4), 21), 5)
    assert sentence(job) == "all 4 workers are in all_reduce 21"


def test_of_many_late_ranks_two_are_named() -> None:
    job = WatchedJob(6)
    run_fast(job, 6)
    beat(job, {0: 21} | dict.fromkeys(range(1, 6), 20), 5)
    assert sentence(job) == "rank 1 (host-2), rank 2 (host-3) and 3 more have not entered all_reduce 21"


def test_ranks_that_wait_in_a_part_of_the_group_are_named() -> None:
    job = WatchedJob(3)
    run_fast(job, 3)
    for _ in range(8):
        job.now += 0.5
        for member in (0, 1):
            hear(job, {member: 20}, inside=False, part="all_reduce 5 of group 'split1'", operations=30)
        hear(job, {2: 20}, inside=False, operations=30)
    assert sentence(job) == (
        "rank 0 (host-1) and rank 1 (host-2) are in all_reduce 5 of group 'split1'; rank 2 (host-3) is in none"
    )
    assert job.tally.reports.operations == 30


def test_members_that_only_compute_do_not_stall() -> None:
    job = WatchedJob(2)
    run_fast(job, 2)
    for _ in range(60):
        job.now += 0.5
        hear(job, {0: 20, 1: 20}, inside=False)
    assert stall(job) is None


def test_steps_that_take_long_in_this_job_are_no_stall() -> None:
    job = WatchedJob(2)
    for number in range(1, 6):  # rank 1 takes 4 s for each, and rank 0 waits for it
        beat(job, {0: number, 1: number - 1}, 4)
        hear(job, {0: number, 1: number})
        assert stall(job) is None
    beat(job, {0: 6, 1: 5}, 11)
    assert stall(job) is None
    beat(job, {0: 6, 1: 5}, 3)
    assert stall(job) is not None


def test_an_evaluation_that_comes_again_is_no_stall() -> None:
    job = WatchedJob(2)
    stalled = []
    for number in range(4):  # fast steps for two minutes, then rank 0 evaluates for 10 s
        first = 240 * number
        for step in range(first + 1, first + 241):
            beat(job, {0: step, 1: step}, 0.5)
        for _ in range(20):
            job.now += 0.5
            hear(job, {0: first + 240}, inside=False)
            hear(job, {1: first + 241})
            stalled.append(stall(job) is not None)
    assert any(stalled[:20]), "the first one is unusual"
    assert not any(stalled[20:])


def test_a_job_without_a_live_view_is_not_stalled() -> None:
    job = WatchedJob(2)
    run_fast(job, 2)
    beat(job, {0: 21, 1: 20}, 5)
    assert stall(job) is not None
    job.kill(2)
    job.pass_time(1)
    assert job.state.live is None
    assert stall(job) is None


def test_after_a_restart_of_the_coordinator_nothing_is_counted_twice() -> None:
    job = WatchedJob(2)
    run_fast(job, 2)
    job.tally = Tally(job.now, job.state)
    job._falls = {}
    since = job.now - 3600
    for _ in range(10):
        job.now += 0.5
        for member, operation in ((0, 1_000_000), (1, 999_999)):
            progress = Progress(operation, since, operation == 1_000_000, doing="all_reduce")
            job.do(Heard(job.members[member], progress, Counters(operations=operation)))
    assert job.tally.reports.operations == 0
    found = stall(job)
    assert found is not None
    assert found[0] == pytest.approx(3605.0)
    hear(job, {0: 1_000_002, 1: 1_000_002})
    assert job.tally.reports.operations == 2


def test_collectives_of_rank_0_are_counted_over_generations() -> None:
    job = WatchedJob(3)
    run_fast(job, 3, 10)
    assert job.tally.reports.operations == 10
    assert job.tally.reports.operations_per_second(job.now) == pytest.approx(2.0, rel=0.2)
    hear(job, {0: 3}, operations=13)  # the numbers begin anew, and the count of all goes on
    assert job.tally.reports.operations == 13


def test_logged_values_are_means_over_the_members_that_log_them() -> None:
    job = WatchedJob(3)
    hear(job, {0: 1}, logged={"loss": 1.0, "lr": 0.1})
    hear(job, {1: 1}, logged={"loss": 3.0}, total=500)
    hear(job, {2: 1})
    job.now += 1.0
    assert job.tally.reports.logged(job.now) == {"loss": 2.0, "lr": 0.1}
    assert job.tally.reports.total == 500
    hear(job, {2: 1})
    assert job.tally.history.columns["logged/loss"][-1] == 2.0


def test_workers_that_wait_for_a_seat_log_nothing_for_the_job() -> None:
    job = WatchedJob(2, most=2)
    hear(job, {0: 1}, logged={"loss": 1.0})
    for number in range(50):
        job.members.append(job.join(1, 2))
        hear(job, {2 + number: 1}, logged={"loss": 1e9, f"name{number}": 1.0}, total=7)
    job.now += 1.0
    assert job.tally.reports.logged(job.now) == {"loss": 1.0}
    assert job.tally.reports.total == 0
    assert len(job.tally.reports._logged) == 1


def test_a_stall_has_one_event_when_it_begins_and_one_when_it_ends() -> None:
    job = WatchedJob(3)
    run_fast(job, 3)
    beat(job, {0: 21, 1: 20, 2: 21}, 1.5)
    assert job.told("stalled") == []
    beat(job, {0: 21, 1: 20, 2: 21}, 11)
    assert job.told("stalled") == ["the job is stalled: rank 1 (host-2) has not entered all_reduce 21"]
    assert job.told("resumed") == []
    beat(job, dict.fromkeys(range(3), 21), 0.5)
    beat(job, dict.fromkeys(range(3), 22), 0.5)
    assert job.told("resumed") == ["the job goes on after 12 s"]
    assert len(job.told("stalled")) == 1


def test_a_stall_has_an_event_though_heartbeats_come_one_after_the_other() -> None:
    job = WatchedJob(4)
    run_fast(job, 4)
    for _ in range(30):
        for number, member in enumerate(job.members):
            job.now += 0.125
            told = Progress(21 - (number == 1), job.now, number != 1, doing="all_reduce")
            job.do(Heard(member, told, Counters(operations=told.operation)))
    assert job.told("stalled") == ["the job is stalled: rank 1 (host-2) has not entered all_reduce 21"]


def take_steps(job: WatchedJob, until: int) -> None:
    """Each step takes half a second, and has one operation."""
    for step in range(1, until + 1):
        for member in job.members:
            job.do(Heard(member, Progress(step, job.now, False, step, job.now), Counters(operations=step)))
        job.now += 0.5


def hang(job: WatchedJob, step: int, seconds: float) -> None:
    """Rank 1 does not enter the operation after a step, in which the others wait."""
    for _ in range(round(2 * seconds)):
        for number, member in enumerate(job.members):
            told = Progress(step + (number != 1), job.now, number != 1, step, job.now, "all_reduce")
            job.do(Heard(member, told, Counters(operations=told.operation)))
        job.now += 0.5


def test_a_stall_that_a_loss_ends_goes_on_with_the_next_generation() -> None:
    job = WatchedJob(3)
    take_steps(job, 30)
    hang(job, 30, 10)
    before = job.tally.goodput(job.now)
    job.kill(2)
    assert job.told("resumed") == []
    assert job.tally.goodput(job.now) == pytest.approx(before, rel=0.03), "no second counts twice"
    job.stop([job.members[0], job.members[2]], 30)
    assert job.told("resumed") == ["the job goes on after 10 s"]
    assert job.tally.goodput(job.now) == pytest.approx(before, rel=0.03)
    assert job.tally._stalled == 0.0, "its seconds are counted"


def test_a_stall_lowers_the_goodput_at_once_and_for_good() -> None:
    job = WatchedJob(2)
    take_steps(job, 30)
    counted, waiting = sum(job.seconds.values()), job.seconds.get("waiting", 0.0)
    committed = job.seconds["committed"]
    assert job.tally.goodput(job.now) == pytest.approx(committed / counted)
    hang(job, 30, 10)
    assert len(job.told("stalled")) == 1
    assert job.tally.goodput(job.now) == pytest.approx(committed / (counted + 10), rel=0.01)
    for member in job.members:
        job.do(Heard(member, Progress(31, job.now, False, 31, job.now), Counters(operations=31)))
    assert len(job.told("resumed")) == 1
    assert job.seconds["waiting"] - waiting == pytest.approx(10)
    assert job.tally.goodput(job.now) == pytest.approx((committed + 0.5) / (counted + 10.5))


def test_stalls_that_follow_each_other_closely_have_one_event() -> None:
    job = WatchedJob(3)
    take_steps(job, 30)
    for step in range(30, 36):
        hang(job, step, 5)
        for member in job.members:
            job.do(Heard(member, Progress(step + 1, job.now, False, step + 1, job.now), Counters(operations=step + 1)))
    assert (len(job.told("stalled")), len(job.told("resumed"))) == (1, 1)
    hang(job, 36, 60)
    assert len(job.told("stalled")) == 2


def test_a_stall_ends_with_the_job() -> None:
    job = WatchedJob(2)
    take_steps(job, 30)
    hang(job, 30, 10)
    before = job.tally.goodput(job.now)
    job.do(FinishedLine(job.members[0], job.state.generation, 31))
    assert job.told("resumed") == ["the job goes on after 10 s"]
    assert job.tally.goodput(job.now) == pytest.approx(before, rel=0.02), "its seconds were no training"
    assert job.tally.reports.stalled_at is None
