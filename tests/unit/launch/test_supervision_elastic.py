"""What a launcher of an elastic job does about ends, and its exit code. Time is an argument."""

from __future__ import annotations

import signal

import pytest

from paceline.launch._supervision import DRAIN_S, KILL_AFTER_S, SAME_S, Exit, Supervision, Terms


def supervise(
    *, workers: int = 4, minimum: int = 2, restarts: int = 0, alone: bool = True, elastic: bool = True
) -> Supervision:
    terms = Terms(workers=workers, minimum=minimum, elastic=elastic, alone=alone, restarts=restarts)
    supervision = Supervision(8.0, terms)
    for slot in range(workers):
        supervision.began(slot, 0.0)
    return supervision


def end(slot: int, returncode: int, *, follows: bool = False, joined: bool = True) -> Exit:
    return Exit(f"rank {slot}", 100 + slot, returncode, follows, slot, joined)


def test_other_workers_continue_after_one_is_killed() -> None:
    supervision = supervise()
    assert supervision.ended(end(1, -9), 10.0) == "rank 1 (pid 101) was killed by SIGKILL; 3 of 4 workers are left"
    assert supervision.deadline is None


def test_a_restart_is_due_once() -> None:
    supervision = supervise(restarts=3)
    said = supervision.ended(end(2, -9), 10.0)
    assert said == "restarting rank 2 (pid 102 was killed by SIGKILL) as a new worker in 0.1 s (1 of its 3 restarts)"
    assert (supervision.deadline, supervision.restarting) == (10.1, True)
    assert supervision.restarts_due(10.0) == []
    assert supervision.restarts_due(10.1) == [2]
    assert supervision.restarts_due(10.1) == []
    assert (supervision.deadline, supervision.restarting) == (None, False)


def test_a_worker_that_exits_with_0_is_not_restarted() -> None:
    supervision = supervise(restarts=3)
    assert supervision.ended(end(2, 0), 10.0) == ""
    assert not supervision.restarting


def test_remaining_workers_are_stopped_if_the_minimum_is_unreachable() -> None:
    supervision = supervise(workers=3, minimum=2)
    supervision.ended(end(0, -9), 10.0)
    assert supervision.deadline is None
    said = supervision.ended(end(1, 7), 11.0)
    assert said == "rank 1 (pid 101) ended with exit code 7; the job needs 2 workers and cannot get them any more"
    assert supervision.deadline == 19.0
    assert supervision.due(19.0) is signal.SIGTERM
    assert supervision.deadline == 19.0 + KILL_AFTER_S
    supervision.ended(end(2, 0), 19.5)  # it was told to leave: it has not seen the job through
    assert (supervision.exit_code, supervision.summary) == (137, "")


def test_workers_continue_below_the_minimum_if_other_launchers_may_join() -> None:
    supervision = supervise(workers=2, minimum=2, alone=False)
    supervision.ended(end(0, -9), 10.0)
    assert supervision.deadline is None


def test_workers_that_exited_with_0_count_toward_the_minimum() -> None:
    supervision = supervise(workers=3, minimum=2)
    supervision.ended(end(0, 0), 10.0)
    supervision.ended(end(1, 1), 10.0)
    assert supervision.deadline is None, "rank 2 may still have something to do"


def test_a_due_restart_is_canceled_if_the_job_cannot_continue() -> None:
    supervision = supervise(workers=2, minimum=2, restarts=1)
    supervision.ended(end(0, 1), 10.0)
    assert supervision.restarts_due(11.0) == [0]
    supervision.ended(end(1, 1), 20.0)
    assert supervision.restarting
    supervision.ended(end(0, 5), 20.05)
    assert not supervision.restarting
    assert supervision.exit_code == 5


def test_a_failure_during_the_grace_period_is_not_restarted() -> None:
    supervision = supervise(workers=3, minimum=3, restarts=1)
    supervision.ended(end(0, 1), 10.0)
    supervision.restarts_due(11.0)
    supervision.ended(end(0, 1), 20.0)
    assert supervision.ended(end(1, 1, follows=True), 21.0) == "rank 1 (pid 101) ended with exit code 1"
    assert not supervision.restarting


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels_restarts_and_leaves_time_to_drain(signum: signal.Signals) -> None:
    supervision = supervise(restarts=3)
    supervision.ended(end(0, -9), 10.0)
    supervision.interrupt(signum, 10.0)
    assert not supervision.restarting
    assert supervision.due(10.0) is signal.SIGTERM
    assert supervision.deadline == 10.0 + DRAIN_S
    assert supervision.ended(end(1, 1), 11.0) == ""
    assert not supervision.restarting
    supervision.interrupt(signum, 12.0)
    assert supervision.due(12.0) is signal.SIGKILL
    assert supervision.exit_code == 128 + signum


@pytest.mark.parametrize(
    ("signum", "elastic", "codes", "code"),
    [
        (signal.SIGTERM, True, (0, 0, 0, 0), 0),
        (signal.SIGINT, True, (0, 0, 0, 0), 130),  # a shell must not go on with the next command
        (signal.SIGHUP, True, (0, 0, 0, 0), 129),
        (signal.SIGTERM, False, (0, 0, 0, 0), 143),
        (signal.SIGTERM, True, (0, 0, -15, 0), 143),  # one was not in a step yet
        (signal.SIGTERM, True, (0, 0, 0, -9), 143),
        (signal.SIGTERM, True, (), 143),
    ],
)
def test_exit_code_after_a_signal_depends_on_signal_and_worker_exits(
    signum: signal.Signals, elastic: bool, codes: tuple[int, ...], code: int
) -> None:
    supervision = supervise(elastic=elastic)
    supervision.interrupt(signum, 10.0)
    supervision.due(10.0)
    for slot, returncode in enumerate(codes):
        supervision.ended(end(slot, returncode), 11.0)
    assert supervision.exit_code == code


def test_a_job_of_fixed_size_is_not_given_time_to_drain() -> None:
    supervision = supervise(elastic=False)
    supervision.interrupt(signal.SIGTERM, 10.0)
    supervision.due(10.0)
    assert supervision.deadline == 10.0 + KILL_AFTER_S


@pytest.mark.parametrize(
    ("restarts", "ends", "code"),
    [
        (0, [(0, 0), (1, 0), (2, 0), (3, 0)], 0),
        (0, [(1, -9), (0, 0), (2, 0), (3, 0)], 0),  # the others saw it through
        (0, [(0, 0), (2, 0), (3, 0), (1, -9)], 137),  # it failed after the last that ended well
        (0, [(0, 0), (1, 3), (2, 0), (3, 4)], 4),  # the first one was survived, the second was not
        (0, [(0, 1), (1, 1), (2, 1), (3, 1)], 1),
        (1, [(1, 3), (1, 0), (0, 0), (2, 0), (3, 0)], 0),  # made good by a restart
        (1, [(0, 0), (2, 0), (3, 0), (1, 3), (1, 0)], 0),
        (1, [(1, 3), (1, 4), (0, 0), (2, 0), (3, 0)], 0),
        (1, [(0, 0), (2, 0), (3, 0), (1, 3), (1, 4)], 4),  # its last process counts
    ],
)
def test_exit_code_reflects_failures_that_the_job_did_not_survive(
    restarts: int, ends: list[tuple[int, int]], code: int
) -> None:
    supervision = supervise(minimum=1, restarts=restarts)
    for now, (slot, returncode) in enumerate(ends):
        supervision.ended(end(slot, returncode), float(now))
        for again in supervision.restarts_due(now + 0.9):
            supervision.began(again, now + 0.9)
    assert supervision.exit_code == code


def test_exit_code_comes_from_the_original_failure() -> None:
    supervision = supervise(minimum=1)
    supervision.ended(end(0, 1, follows=True), 1.0)
    supervision.ended(end(1, 7), 1.0)
    assert supervision.exit_code == 7


def test_the_summary_names_the_workers_that_were_lost() -> None:
    supervision = supervise()
    supervision.ended(end(1, -9), 1.0)
    supervision.ended(end(3, 2), 1.0)
    assert supervision.summary == ""
    supervision.ended(end(0, 0), 2.0)
    assert supervision.summary == (
        "the others finished the job without rank 1 (pid 101 was killed by SIGKILL) "
        "and rank 3 (pid 103 ended with exit code 2)"
    )


def test_a_first_signal_after_a_drain_order_changes_nothing() -> None:
    supervision = supervise()
    supervision.drain(10.0, 100.0)
    assert supervision.due(10.0) is signal.SIGTERM
    supervision.interrupt(signal.SIGTERM, 40.0)  # the first signal: the scheduler says what the source has said
    assert supervision.due(40.0) is None
    assert supervision.deadline == 110.0
    for slot in range(4):
        supervision.ended(end(slot, 0), 41.0)
    assert supervision.exit_code == 0


def test_a_second_signal_after_a_drain_order_kills() -> None:
    supervision = supervise()
    supervision.drain(10.0)
    assert supervision.due(10.0) is signal.SIGTERM
    supervision.interrupt(signal.SIGTERM, 12.0)
    supervision.interrupt(signal.SIGTERM, 14.0)
    assert supervision.due(14.0) is signal.SIGKILL


def test_ctrl_c_after_a_drain_order_exits_with_130() -> None:
    supervision = supervise()
    supervision.drain(10.0)
    supervision.due(10.0)
    supervision.interrupt(signal.SIGINT, 11.0)
    assert supervision.due(11.0) is None
    for slot in range(4):
        supervision.ended(end(slot, 0), 12.0)
    assert supervision.exit_code == 130


def test_a_drain_order_after_a_signal_changes_nothing() -> None:
    supervision = supervise()
    supervision.interrupt(signal.SIGTERM, 10.0)
    assert supervision.due(10.0) is signal.SIGTERM
    supervision.drain(11.0, 100.0)
    assert supervision.due(11.0) is None
    assert supervision.deadline == 10.0 + DRAIN_S


def test_two_sigterms_within_a_second_count_as_one() -> None:
    supervision = supervise()
    supervision.interrupt(signal.SIGTERM, 10.0)
    assert supervision.due(10.0) is signal.SIGTERM
    supervision.interrupt(signal.SIGTERM, 10.0 + SAME_S)
    assert supervision.due(11.0) is None
    supervision.interrupt(signal.SIGTERM, 11.5)
    assert supervision.due(11.5) is signal.SIGKILL


def test_earlier_losses_do_not_change_the_exit_code_of_a_drain() -> None:
    terms = Terms(workers=8, minimum=1, elastic=True, drained_code=75)
    supervision = Supervision(8.0, terms)
    supervision.ended(end(3, -9), 10.0)
    supervision.interrupt(signal.SIGTERM, 1000.0)
    supervision.due(1000.0)
    for slot in {*range(8)} - {3}:
        supervision.ended(end(slot, 0), 1001.0)
    assert supervision.exit_code == 75


def test_a_hung_worker_is_ended_only_if_a_new_one_may_take_its_place() -> None:
    assert supervise(restarts=1).ends_hung(1)
    assert not supervise().ends_hung(1)
    supervision = supervise(restarts=1)
    supervision.ended(end(1, -9), 10.0)
    supervision.restarts_due(11.0)
    assert not supervision.ends_hung(1), "its restart is used up"
    assert supervision.ends_hung(2)
    supervision.interrupt(signal.SIGTERM, 12.0)
    assert not supervision.ends_hung(2), "it is being ended already"


def test_a_hung_worker_that_was_killed_is_restarted() -> None:
    supervision = supervise(restarts=1)
    supervision.killed_hung(1)
    hung = Exit("rank 1", 101, -9, slot=1, joined=True, words="was killed after the job had gone on without it")
    assert supervision.ended(hung, 10.0) == (
        "restarting rank 1 (pid 101 was killed after the job had gone on without it) as a new worker in 0.1 s "
        "(its only restart)"
    )
    assert supervision.restarts_due(11.0) == [1]


def test_no_worker_is_restarted_once_the_job_is_done() -> None:
    supervision = supervise(restarts=3)
    supervision.ended(end(1, -9), 10.0)
    supervision.job_done(True, 10.0)
    assert not supervision.restarting, "the restart was pending"
    assert supervision.restartable([0, 2, 3]) == 0
    assert supervision.ended(end(2, -9), 11.0) == "rank 2 (pid 102) was killed by SIGKILL"
    assert (supervision.restarting, supervision.exit_code) == (False, 137)
    for slot in (0, 3):
        supervision.ended(end(slot, 0), 12.0)
    assert supervision.exit_code == 0
    assert supervision.summary == (
        "the others finished the job without rank 1 (pid 101 was killed by SIGKILL) and rank 2 (pid 102 was killed by "
        "SIGKILL)"
    )


def test_failures_after_the_job_is_done_do_not_stop_the_others() -> None:
    supervision = supervise(minimum=4)
    supervision.job_done(True, 10.0)
    supervision.ended(end(1, -9), 10.0)
    assert supervision.deadline is None


def test_a_hung_worker_is_killed_without_a_failure_once_the_job_is_done() -> None:
    supervision = supervise()
    supervision.job_done(True, 10.0)
    assert supervision.ends_hung(1)
    for slot in (0, 2, 3):
        supervision.ended(end(slot, 0), 10.0)
    supervision.killed_hung(1)
    assert supervision.ended(end(1, -9), 11.0) == "rank 1 (pid 101) was killed by SIGKILL"
    assert (supervision.exit_code, supervision.summary) == (0, "")


def test_workers_are_restarted_again_in_the_next_loop() -> None:
    supervision = supervise(restarts=1)
    supervision.job_done(True, 10.0)
    supervision.job_done(False, 11.0)
    assert "restarting" in supervision.ended(end(1, -9), 10.0)


def test_the_next_job_stops_if_too_few_workers_are_left_for_it() -> None:
    supervision = supervise(minimum=4, restarts=1)
    supervision.job_done(True, 10.0)
    supervision.ended(end(1, -9), 11.0)
    assert supervision.deadline is None
    supervision.job_done(True, 12.0)
    supervision.job_done(False, 13.0)
    assert supervision.due(21.0) is signal.SIGTERM
