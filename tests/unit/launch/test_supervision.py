"""How ends are told and blamed, and when workers are stopped. Time is an argument."""

from __future__ import annotations

import signal

import pytest

from paceline.launch._supervision import KILL_AFTER_S, Exit, Supervision, Terms, likely_cause_first, shell_code


@pytest.mark.parametrize(
    ("returncode", "words", "code"),
    [
        (0, "rank 2 (pid 9) ended with exit code 0", 0),
        (3, "rank 2 (pid 9) ended with exit code 3", 3),
        (-9, "rank 2 (pid 9) was killed by SIGKILL", 137),
        (-15, "rank 2 (pid 9) was killed by SIGTERM", 143),
        (-64, "rank 2 (pid 9) was killed by SIGRTMAX", 192),
        (-50, "rank 2 (pid 9) was killed by signal 50", 178),
    ],
)
def test_an_exit_is_described_in_words_and_as_a_shell_code(returncode: int, words: str, code: int) -> None:
    assert str(Exit("rank 2", 9, returncode)) == words
    assert shell_code(returncode) == code


def test_a_kill_is_blamed_before_the_errors_that_it_causes() -> None:
    ends = [Exit("rank 0", 1, 0), Exit("rank 1", 2, 1), Exit("rank 2", 3, -9)]
    assert [end.label for end in likely_cause_first(ends)] == ["rank 2", "rank 1", "rank 0"]


def test_a_clean_exit_sets_no_deadline_and_exit_code_0() -> None:
    supervision = Supervision(grace=8.0)
    supervision.ended(Exit("rank 0", 1, 0), now=1.0)
    assert (supervision.deadline, supervision.due(1e9), supervision.exit_code) == (None, None, 0)


def test_after_a_failure_the_others_get_a_grace_then_sigterm_then_sigkill() -> None:
    supervision = Supervision(grace=8.0)
    supervision.ended(Exit("rank 2", 3, -9), now=100.0)
    supervision.ended(Exit("rank 1", 2, 1), now=100.1)
    assert supervision.deadline == 108.0
    assert supervision.due(107.9) is None
    assert not supervision.stopping
    assert supervision.due(108.0) is signal.SIGTERM
    assert supervision.stopping
    assert supervision.due(108.0) is None
    assert supervision.deadline == 108.0 + KILL_AFTER_S
    assert supervision.due(108.0 + KILL_AFTER_S) is signal.SIGKILL
    assert supervision.deadline is None
    assert supervision.exit_code == 137


def test_exit_code_prefers_an_original_failure_over_its_consequences() -> None:
    supervision = Supervision(grace=8.0)
    supervision.ended(Exit("rank 0", 1, 1, follows=True), now=100.0)
    supervision.ended(Exit("rank 1", 2, 5), now=100.1)
    supervision.ended(Exit("rank 2", 3, 6), now=100.2)
    assert supervision.exit_code == 5
    assert supervision.deadline == 108.0


def test_an_interrupt_stops_workers_at_once_and_sets_the_exit_code() -> None:
    supervision = Supervision(grace=8.0)
    supervision.interrupt(signal.SIGINT, now=5.0)
    assert supervision.due(5.0) is signal.SIGTERM
    supervision.ended(Exit("rank 0", 1, -15), now=5.1)
    assert supervision.exit_code == 130


def test_a_second_interrupt_kills_at_once() -> None:
    supervision = Supervision(grace=8.0)
    supervision.interrupt(signal.SIGINT, now=5.0)
    assert supervision.due(5.0) is signal.SIGTERM
    supervision.interrupt(signal.SIGINT, now=5.5)
    assert supervision.due(5.5) is signal.SIGKILL
    assert supervision.due(99.0) is None


def test_two_interrupts_at_one_moment_kill() -> None:
    supervision = Supervision(grace=8.0)
    supervision.interrupt(signal.SIGTERM, now=5.0)
    supervision.interrupt(signal.SIGINT, now=5.0)
    assert supervision.due(5.0) is signal.SIGKILL
    assert supervision.due(5.0) is None
    assert supervision.exit_code == 143


def test_workers_that_are_stopped_do_not_count_as_failures() -> None:
    supervision = Supervision(grace=8.0)
    supervision.stop(now=100.0)
    assert supervision.due(100.0) is signal.SIGTERM
    supervision.stop(now=101.0)  # said again
    supervision.ended(Exit("rank 0", 1, -15), now=101.0)
    assert supervision.due(100.0 + KILL_AFTER_S) is signal.SIGKILL
    supervision.ended(Exit("rank 1", 2, -9), now=106.0)
    assert (supervision.exit_code, supervision.failure, supervision.interrupted) == (0, None, False)


def test_failure_is_the_exit_that_sets_the_exit_code() -> None:
    supervision = Supervision(grace=8.0)
    supervision.ended(Exit("rank 0", 1, 1, follows=True), now=100.0)
    first = Exit("rank 1", 2, 5)
    supervision.ended(first, now=100.1)
    assert supervision.failure == first


def test_drained_workers_end_with_the_configured_exit_code() -> None:
    terms = Terms(workers=1, elastic=True, drained_code=75)
    for returncode, code in ((0, 75), (-15, 143)):
        supervision = Supervision(grace=8.0, terms=terms)
        supervision.interrupt(signal.SIGTERM, now=5.0)
        supervision.ended(Exit("rank 0", 1, returncode), now=5.5)
        assert supervision.exit_code == code
    done = Supervision(grace=8.0, terms=terms)
    done.ended(Exit("rank 0", 1, 0), now=5.5)
    assert done.exit_code == 0, "a job that is done is not requeued"


def test_a_worker_that_exits_with_0_before_the_last_step_is_lost() -> None:
    supervision = Supervision(grace=8.0, terms=Terms(workers=2, minimum=2, elastic=True, restarts=3))
    said = supervision.ended(Exit("rank 0", 1, 0, unfinished=True), now=100.0)
    assert said.startswith("rank 0 (pid 1) ended with exit code 0 before the last step; the job needs 2 workers")
    assert supervision.due(108.0) is signal.SIGTERM
    supervision.ended(Exit("rank 1", 2, 0), now=108.1)
    assert supervision.exit_code == 1


def test_other_workers_continue_without_one_that_left_early() -> None:
    supervision = Supervision(grace=8.0, terms=Terms(workers=2, minimum=1, elastic=True))
    supervision.ended(Exit("rank 0", 1, 0, unfinished=True), now=100.0)
    assert supervision.deadline is None
    supervision.ended(Exit("rank 1", 2, 0), now=108.1)
    assert supervision.exit_code == 0


def test_a_worker_that_is_done_sets_no_deadline_for_the_others() -> None:
    supervision = Supervision(grace=8.0, terms=Terms(workers=2, minimum=2, elastic=True))
    assert supervision.ended(Exit("rank 0", 1, 0), now=100.0) == ""
    assert (supervision.deadline, supervision.exit_code) == (None, 0)
