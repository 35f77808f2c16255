"""Who is started again, when, and who is given up. Time is an argument."""

from __future__ import annotations

import pytest

from paceline.launch._supervision import Exit, Restarts

KILLED = Exit("rank 2", 4711, -9, slot=2, joined=True)
AT_ONCE = Exit("worker #2", 4711, 1, slot=2)


def lives(restarts: Restarts, end: Exit, *seconds: float) -> list[float | None]:
    """One worker after another lives for so long; returns the pauses before the next ones."""
    pauses: list[float | None] = []
    now = 100.0
    for lived in seconds:
        restarts.began(end.slot, now)
        now += lived
        at = restarts.failed(end, now).at
        pauses.append(None if at is None else round(at - now, 3))
        now = now if at is None else at
    return pauses


@pytest.mark.parametrize(
    ("limit", "lived", "pauses"),
    [
        (0, [10], [None]),
        (1, [10, 10], [0.1, None]),
        (3, [10, 10, 10, 10], [0.1, 0.2, 0.4, None]),
        (9, [10] * 9, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]),
        (9, [10, 10, 60, 10, 10], [0.1, 0.2, 0.1, 0.2, 0.4]),  # it was well for a minute
        (9, [1, 1, 1, 1], [0.1, 0.2, 0.4, 0.8]),  # it was in a view each time
    ],
)
def test_pauses_before_restarts_grow_until_the_limit(
    limit: int, lived: list[float], pauses: list[float | None]
) -> None:
    assert lives(Restarts(limit), KILLED, *lived) == pauses


@pytest.mark.parametrize(
    ("lived", "pauses"),
    [
        ([1, 1, 1], [0.1, 0.2, None]),
        ([1, 1, 5, 1, 1, 1], [0.1, 0.2, 0.4, 0.8, 1.6, None]),  # one that took longer breaks the row
    ],
)
def test_a_worker_that_repeatedly_dies_at_once_is_given_up(lived: list[float], pauses: list[float | None]) -> None:
    assert lives(Restarts(9), AT_ONCE, *lived) == pauses


def test_restarts_are_counted_per_worker() -> None:
    restarts = Restarts(1)
    for slot in (0, 1):
        restarts.began(slot, 0.0)
        assert restarts.failed(Exit("rank", 1, 1, slot=slot, joined=True), 9.0).at == 9.1
        assert restarts.failed(Exit("rank", 1, 1, slot=slot, joined=True), 19.0).at is None


def test_each_restart_is_reported_in_one_sentence() -> None:
    restarts = Restarts(2)
    restarts.began(2, 0.0)
    texts = [restarts.failed(KILLED, 10.0).text for _ in range(3)]
    assert texts == [
        "restarting rank 2 (pid 4711 was killed by SIGKILL) as a new worker in 0.1 s (1 of its 2 restarts)",
        "restarting rank 2 (pid 4711 was killed by SIGKILL) as a new worker in 0.2 s (2 of its 2 restarts)",
        "rank 2 (pid 4711) was killed by SIGKILL; its 2 restarts are used up",
    ]


def test_giving_up_reports_the_worker_the_exit_and_the_failure_count() -> None:
    restarts = Restarts(9)
    for now in (0.0, 1.0, 2.0):
        restarts.began(2, now)
        last = restarts.failed(AT_ONCE, now + 0.5)
    assert last.text == (
        "giving up on worker #2: it failed 3 times in a row within 5 s, before it had joined the job; "
        "the last process (pid 4711) ended with exit code 1"
    )
