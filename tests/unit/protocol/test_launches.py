"""The first view waits for the workers that a launcher has started."""

from paceline_protocol import Process
from paceline_protocol.coordinator import ExitReported, Launch
from support.coordinator import PureJob

PAIR = Launch("launch-1", 2)


def test_the_first_view_waits_for_a_worker_that_imports_for_longer_than_the_others() -> None:
    job = PureJob()
    first = job.join(1, 4, launch=PAIR)
    job.pass_time(30.0, [first])
    assert job.state.live is None
    assert job.reason == "1 worker is there (at least 1); 1 more of the launcher on host-1 has not joined yet"
    second = job.join(1, 4, launch=PAIR)
    job.pass_time(0.3, [first, second])
    assert job.state.live is not None
    assert job.state.live.world_size == 2


def test_it_waits_for_a_minute_at_most() -> None:
    job = PureJob()
    first = job.join(1, 4, launch=PAIR)
    job.pass_time(59.0, [first])
    assert job.state.live is None
    assert job.membership.next_deadline() <= job.now + 1.0
    job.pass_time(1.0, [first])
    assert job.state.live is not None


def test_the_worker_with_the_least_patience_decides() -> None:
    """It would give up joining before the others have come."""
    job = PureJob()
    first = job.join(1, 4, launch=PAIR._replace(workers=3))
    second = job.join(1, 4, launch=PAIR._replace(workers=3, patience=7.5))
    job.pass_time(7.0, [first, second])
    assert job.state.live is None
    job.pass_time(1.0, [first, second])
    assert job.state.live is not None


def test_two_sessions_of_a_process_are_one_worker() -> None:
    job = PureJob()
    members = [job.join(1, 4, launch=PAIR, host="host-1", pid=7) for _ in range(2)]
    job.pass_time(5.0, members)
    assert job.state.live is None


def test_it_waits_no_more_once_a_worker_of_the_launcher_has_ended() -> None:
    job = PureJob()
    job.join(1, 4, launch=PAIR)
    job.do(ExitReported(Process("host-1", 4711), 1, launch_id="launch-2"))
    job.pass_time(1.0, ["m1"])
    assert job.state.live is None
    job.do(ExitReported(Process("host-1", 4711), 1, launch_id=PAIR.id))
    assert job.state.live is not None


def test_it_does_not_wait_for_a_launcher_of_which_one_ended_before_the_first_came() -> None:
    job = PureJob()
    job.state.launches.over(PAIR.id)
    job.join(1, 4, launch=PAIR)
    job.pass_time(0.3, ["m1"])
    assert job.state.live is not None


def test_a_full_job_starts_at_once() -> None:
    job = PureJob()
    job.join(1, 2, launch=Launch("launch-1", 3))
    job.join(1, 2, launch=Launch("launch-1", 3))
    assert job.state.live is not None


def test_of_two_launchers_it_waits_for_the_later_one() -> None:
    job = PureJob()
    members = [job.join(1, 8, launch=PAIR), job.join(1, 8, launch=PAIR)]
    job.pass_time(0.1, members)
    members.append(job.join(1, 8, host="host-b", launch=Launch("launch-2", 3)))
    job.pass_time(20.0, members)
    assert job.state.live is None
    assert "2 more of the launcher on host-b have not joined yet" in job.reason


def test_later_views_do_not_wait_for_a_launcher() -> None:
    """Its workers that join again may be fewer, though the launcher has not reported an end."""
    job = PureJob()
    members = [job.join(1, 4, launch=PAIR), job.join(1, 4, launch=PAIR)]
    job.pass_time(0.3, members)
    assert job.state.live is not None
    for member in members:
        job.leave(member)
    again = job.join(1, 4, launch=PAIR)
    job.pass_time(0.3, [again])
    assert job.state.live is not None


def test_only_the_latest_launches_are_remembered() -> None:
    job = PureJob()
    job.join(1, 4, launch=PAIR)
    for number in range(5_000):
        job.state.launches.over(f"other-{number}")
    job.pass_time(0.3, ["m1"])
    assert job.state.live is not None
