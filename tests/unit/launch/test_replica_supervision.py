"""A launcher ends and restarts all ranks of a replica together. Time is an argument."""

from __future__ import annotations

import itertools
import signal

import pytest

from paceline.launch._replicas import MATES_S, ReplicaSupervision
from paceline.launch._supervision import KILL_AFTER_S, Exit, Terms

SIZE = 3


def supervise(
    *, replicas: int = 2, minimum: int = 1, restarts: int = 3, elastic: bool = True, size: int = SIZE
) -> ReplicaSupervision:
    terms = Terms(workers=replicas, minimum=minimum, elastic=elastic, restarts=restarts)
    supervision = ReplicaSupervision(8.0, terms, size)
    for slot in range(replicas * size):
        supervision.began(slot, 0.0)
    return supervision


def end(slot: int, returncode: int, *, follows: bool = False, joined: bool = True, unfinished: bool = False) -> Exit:
    replica, rank = divmod(slot, SIZE)
    return Exit(f"replica {replica}", 100 + slot, returncode, follows, slot, joined, unfinished, rank)


def ends(supervision: ReplicaSupervision, now: float, *codes: tuple[int, int]) -> list[str]:
    """Ranks with these slots end with these codes, one after the other; returns what is said."""
    return [said for slot, code in codes if (said := supervision.ended(end(slot, code), now))]


def test_a_replica_restarts_after_all_its_ranks_have_ended() -> None:
    supervision = supervise()
    assert supervision.ended(end(5, -9), 10.0) == ""
    assert (supervision.deadline, supervision.restarting) == (10.0 + MATES_S, False)
    assert supervision.mates_to_kill(10.4) == []
    assert supervision.mates_to_kill(10.5) == [3, 4, 5]
    assert supervision.mates_to_kill(10.5) == []
    assert supervision.deadline is None
    assert ends(supervision, 10.6, (3, -9)) == []
    assert ends(supervision, 10.7, (4, -9)) == [
        "restarting replica 1 (rank 2, pid 105 was killed by SIGKILL) as a whole in 0.1 s (1 of its 3 restarts)"
    ]
    assert supervision.deadline == pytest.approx(10.8)
    assert supervision.restarts_due(10.75) == []
    assert supervision.restarts_due(10.8) == [3, 4, 5]
    assert not supervision.restarting
    assert supervision.ended(end(3, 7), 20.0) == "", "the new replica may fail like the one before"
    assert supervision.mates_to_kill(20.5) == [3, 4, 5]
    assert "(rank 0, pid 103 ended with exit code 7)" in ends(supervision, 20.6, (4, -9), (5, -9))[0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(SIZE))))
@pytest.mark.parametrize("first", [7, -9])
@pytest.mark.parametrize("mates", [0, 1, -9])
def test_one_restart_follows_from_a_failure_in_whatever_order_the_ranks_end(
    order: tuple[int, ...], first: int, mates: int
) -> None:
    supervision = supervise()
    codes = [(order[0], first), *((slot, mates) for slot in order[1:])]
    (said,) = ends(supervision, 10.0, *codes)
    how = "was killed by SIGKILL" if first < 0 else "ended with exit code 7"
    cause = f"rank {order[0]}, pid {100 + order[0]} {how}"
    assert said == f"restarting replica 0 ({cause}) as a whole in 0.1 s (1 of its 3 restarts)"
    assert supervision.deadline == 10.1, "nobody is left to be killed"
    assert supervision.restarts_due(11.0) == [0, 1, 2]
    for slot in range(SIZE):
        supervision.began(slot, 11.0)
    assert supervision.mates_to_kill(20.0) == [], "the new ranks have no dead mate"
    assert "2 of its 3" in ends(supervision, 20.0, *codes)[0], "and are counted from the start"


@pytest.mark.parametrize("failed", range(SIZE))
def test_a_rank_that_fails_after_its_mates_have_ended_well_fails_its_replica(failed: int) -> None:
    supervision = supervise()
    mates = [(slot, 0) for slot in range(SIZE) if slot != failed]
    assert ends(supervision, 10.0, *mates) == []
    assert supervision.deadline is None, "ranks need not end at the same time"
    (said,) = ends(supervision, 20.0, (failed, 3))
    assert "as a whole" in said


def test_a_replica_is_not_restarted_when_all_its_ranks_exit_with_0() -> None:
    supervision = supervise()
    assert ends(supervision, 10.0, (0, -9), (1, -9), (2, -9), (3, 0), (4, 0)) != []
    supervision.restarts_due(11.0)
    assert not supervision.restarting
    assert ends(supervision, 12.0, (5, 0), (0, 0), (2, 0), (1, 0)) == []
    assert (supervision.exit_code, supervision.summary, supervision.deadline) == (0, "", None)


def test_two_mates_that_are_killed_at_once_cost_one_restart() -> None:
    supervision = supervise(restarts=1)
    assert ends(supervision, 10.0, (0, -9), (2, -9)) == []
    assert supervision.deadline == 10.0 + MATES_S, "from the first one on"
    assert supervision.mates_to_kill(10.5) == [0, 1, 2]
    (said,) = ends(supervision, 10.6, (1, -9))
    assert said.endswith("as a whole in 0.1 s (its only restart)")
    assert supervision.restarts_due(11.0) == [0, 1, 2]


def test_two_replicas_that_fail_at_once_are_restarted_each() -> None:
    supervision = supervise(replicas=3)
    assert ends(supervision, 10.0, (0, -9), (5, -9)) == []
    assert supervision.mates_to_kill(10.5) == [0, 1, 2, 3, 4, 5]
    said = ends(supervision, 10.6, (3, -9), (1, -9), (2, -9), (4, -9))
    assert [text[:28] for text in said] == ["restarting replica 0 (rank 0", "restarting replica 1 (rank 2"]
    assert supervision.restarts_due(11.0) == [0, 1, 2, 3, 4, 5]


def test_the_first_failure_that_follows_from_no_other_is_named() -> None:
    supervision = supervise()
    supervision.ended(end(1, 1, follows=True), 10.0)
    supervision.ended(end(0, 5), 10.1)
    assert "(rank 0, pid 100 ended with exit code 5)" in supervision.ended(end(2, 6), 10.2)


def test_a_mate_that_was_killed_is_never_the_cause() -> None:
    """The rank that has failed may have left the job, and hang in the end of its process until it is killed."""
    supervision = supervise()
    supervision.ended(end(1, 1, follows=True), 10.0)
    assert supervision.mates_to_kill(10.5) == [0, 1, 2]
    assert "(rank 1, pid 101 ended with exit code 1)" in ends(supervision, 10.6, (0, -9), (2, -9))[0]


def test_a_rank_that_ends_with_0_before_the_last_step_loses_its_replica() -> None:
    """Its script wanted that, so the replica is not started again."""
    supervision = supervise()
    supervision.ended(end(1, 0, unfinished=True), 10.0)
    assert supervision.mates_to_kill(10.5) == [0, 1, 2]
    assert ends(supervision, 10.6, (0, -9), (2, -9)) == [
        "rank 1 of replica 0 (pid 101) ended with exit code 0 before the last step; 1 of 2 replicas is left"
    ]
    assert not supervision.restarting
    ends(supervision, 20.0, (3, 0), (4, 0), (5, 0))
    assert supervision.summary == (
        "the others finished the job without replica 0 (rank 1, pid 101 ended with exit code 0 before the last step)"
    )
    assert supervision.exit_code == 0


def test_restarts_and_the_minimum_count_replicas() -> None:
    supervision = supervise(replicas=3, minimum=2, restarts=1)
    fails = [(0, 4), (1, -9), (2, -9)]
    assert ends(supervision, 10.0, *fails)[0].endswith("as a whole in 0.1 s (its only restart)")
    supervision.restarts_due(11.0)
    assert ends(supervision, 20.0, *fails) == [
        "rank 0 of replica 0 (pid 100) ended with exit code 4; its only restart is used up; 2 of 3 replicas are left"
    ]
    ends(supervision, 30.0, *((slot + 3, code) for slot, code in fails))
    supervision.restarts_due(31.0)
    (said,) = ends(supervision, 40.0, *((slot + 3, code) for slot, code in fails))
    assert said.endswith("its only restart is used up; the job needs 2 replicas and cannot get them any more")
    assert supervision.due(48.0) is signal.SIGTERM
    assert ends(supervision, 48.1, (6, 0), (7, 0), (8, 0)) == []
    assert (supervision.exit_code, supervision.summary) == (4, "")


def test_a_replica_that_dies_at_once_three_times_is_given_up() -> None:
    supervision = supervise(restarts=9)
    said: list[str] = []
    for now in (1.0, 2.0, 3.0):
        said = [supervision.ended(end(slot, 1, joined=False), now) for slot in range(SIZE)]
        for slot in supervision.restarts_due(now + 0.9):
            supervision.began(slot, now + 0.9)
    assert said[-1] == (
        "giving up on replica 0: it failed 3 times in a row within 5 s, before it had joined the job; "
        "the last process (pid 100) ended with exit code 1; 1 of 2 replicas is left"
    )


def test_a_job_of_fixed_size_tells_the_cause_and_stops_the_others() -> None:
    supervision = supervise(elastic=False, restarts=0, minimum=2)
    supervision.ended(end(3, 1, follows=True), 10.0)
    supervision.ended(end(0, -9), 10.0)
    assert supervision.mates_to_kill(10.5) == [3, 4, 5, 0, 1, 2]
    said = ends(supervision, 10.6, (4, -9), (5, -9), (1, -9), (2, -9))
    assert said == [
        "rank 0 of replica 1 (pid 103) ended with exit code 1",
        "rank 0 of replica 0 (pid 100) was killed by SIGKILL",
    ]
    assert supervision.exit_code == 137, "the other one had only followed"
    assert supervision.due(18.6) is signal.SIGTERM


def test_a_drain_kills_no_mates_and_ends_with_0_if_all_ranks_leave() -> None:
    supervision = supervise()
    supervision.interrupt(signal.SIGTERM, 10.0)
    assert supervision.due(10.0) is signal.SIGTERM
    assert ends(supervision, 11.0, *((slot, 0) for slot in range(2 * SIZE))) == []
    assert (supervision.mates_to_kill(99.0), supervision.exit_code) == ([], 0)


def test_a_rank_that_fails_in_a_drain_shows_in_the_exit_code() -> None:
    supervision = supervise()
    supervision.interrupt(signal.SIGTERM, 10.0)
    supervision.due(10.0)
    assert ends(supervision, 11.0, (0, 1)) == []
    assert supervision.mates_to_kill(20.0) == [], "the others may be writing a checkpoint, and have their time"
    ends(supervision, 21.0, (1, 0), (2, 0), (3, 0), (4, 0), (5, 0))
    assert supervision.exit_code == 143


def test_a_replica_that_failed_before_a_drain_does_not_change_its_exit_code() -> None:
    supervision = supervise()
    supervision.ended(end(0, -9), 10.0)
    supervision.interrupt(signal.SIGTERM, 10.1)
    assert supervision.due(10.1) is signal.SIGTERM
    assert supervision.mates_to_kill(10.5) == [0, 1, 2], "its mates cannot leave in good order"
    said = ends(supervision, 10.6, (1, -9), (2, 1))
    assert said == ["rank 0 of replica 0 (pid 100) was killed by SIGKILL"], "it is told all the same"
    assert not supervision.restarting
    ends(supervision, 11.0, (3, 0), (4, 0), (5, 0))
    assert supervision.exit_code == 0


def test_an_interrupt_cancels_the_restart_of_a_replica() -> None:
    supervision = supervise()
    ends(supervision, 10.0, (0, -9), (1, -9), (2, -9))
    supervision.interrupt(signal.SIGINT, 10.05)
    assert not supervision.restarting
    assert supervision.restarts_due(99.0) == []
    ends(supervision, 11.0, (3, 0), (4, 0), (5, 0))
    assert supervision.exit_code == 130


def test_ranks_that_fail_after_they_were_told_to_stop_are_no_failures() -> None:
    supervision = supervise(minimum=2, restarts=0)
    ends(supervision, 10.0, (0, 7), (1, -9), (2, -9))
    assert supervision.due(18.0) is signal.SIGTERM
    assert ends(supervision, 18.1, (3, -15)) == []
    assert supervision.deadline == 18.0 + KILL_AFTER_S
    ends(supervision, 18.2, (4, -15), (5, -15))
    assert supervision.exit_code == 7


def test_a_replica_of_one_rank_is_restarted_like_a_worker() -> None:
    supervision = supervise(size=1)
    lone = Exit("replica 1", 9, 3, slot=1, joined=True, position=0)
    assert supervision.ended(lone, 10.0) == (
        "restarting replica 1 (rank 0, pid 9 ended with exit code 3) as a whole in 0.1 s (1 of its 3 restarts)"
    )
    assert supervision.restarts_due(10.1) == [1]


def test_only_replicas_that_run_or_wait_count_as_restartable() -> None:
    supervision = supervise(restarts=1)
    assert supervision.restartable(range(2 * SIZE)) == 2
    ends(supervision, 10.0, (0, -9), (1, -9), (2, -9))
    assert supervision.restartable([3, 4, 5]) == 2
    supervision.restarts_due(11.0)
    assert supervision.restartable(range(2 * SIZE)) == 1, "the first has used its only restart"


def test_a_hung_rank_is_ended_while_its_replica_may_be_restarted() -> None:
    supervision = supervise(restarts=1)
    assert supervision.ends_hung(4)
    supervision.killed_hung(4)
    assert ends(supervision, 10.0, (4, -9), (3, -9), (5, -9))[0].startswith("restarting replica 1 (rank 1, pid 104 ")
    supervision.restarts_due(11.0)
    assert not supervision.ends_hung(5)
    assert supervision.ends_hung(0)


def test_a_hung_rank_is_no_failure_once_the_job_is_done() -> None:
    supervision = supervise(restarts=0)
    supervision.job_done(True, 9.0)
    ends(supervision, 10.0, (0, 0), (1, 0), (2, 0))
    supervision.killed_hung(4)
    assert ends(supervision, 11.0, (4, -9), (3, -9), (5, -9)) == ["rank 1 of replica 1 (pid 104) was killed by SIGKILL"]
    assert supervision.exit_code == 0
