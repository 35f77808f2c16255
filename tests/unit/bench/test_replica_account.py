"""Which samples entered a committed step, from what the ranks of killed and surviving replicas have told."""

from __future__ import annotations

from typing import Any

from replica_jobs import Rank
from replicas import account, attempts


def rank(pid: int, *told: tuple[Any, ...]) -> Rank:
    """A rank that has told events: (kind, time, step, view, samples), or for "end" whether it took part."""
    names = {"begin": "samples", "end": "takes_part"}
    return Rank(
        pid,
        str(pid),
        [
            {"event": kind, "at": at, "step": step, "view": view, names.get(kind, "more"): more}
            for kind, at, step, view, more in told
        ],
    )


def begins(at: float, step: int, view: int, *samples: int) -> tuple[Any, ...]:
    return "begin", at, step, view, list(samples)


def commits(at: float, step: int, view: int) -> tuple[Any, ...]:
    return "commit", at, step, view, None


def test_samples_of_a_repeated_step_enter_once_and_those_of_a_dropped_one_never() -> None:
    repeats = rank(1, begins(0, 1, 1, 10), begins(1, 1, 2, 10, 11), commits(2, 1, 2), begins(3, 2, 2, 12))
    drops = rank(2, begins(0, 1, 1, 20), begins(1, 1, 2, 21), commits(2, 1, 2), begins(3, 2, 2, 22))
    entered, drawn = account([repeats, drops], end=2.5)
    assert entered == {10: 1, 11: 1, 21: 1}
    assert drawn - entered.keys() == {20}


def test_samples_of_a_killed_rank_enter_if_the_others_have_committed_its_step() -> None:
    killed = rank(1, begins(0, 1, 1, 10))
    lives = rank(2, begins(0, 1, 1, 20), commits(1, 1, 1), begins(2, 2, 1, 21))
    assert account([killed, lives], end=1.5)[0] == {10: 1, 20: 1}


def test_what_a_killed_rank_has_committed_alone_does_not_enter() -> None:
    killed = rank(1, begins(0, 1, 1, 10), commits(1, 1, 1))
    lives = rank(2, begins(0, 1, 1, 20), begins(2, 1, 2, 20), commits(3, 1, 2), begins(4, 2, 2, 21))
    entered, drawn = account([killed, lives], end=3.5)
    assert (entered, drawn) == ({20: 1}, {10, 20})


def test_samples_of_a_replica_that_only_takes_the_state_do_not_enter() -> None:
    """It learns step and view of the attempt during the attempt."""
    heals = rank(1, begins(0, 1, -1, 10), ("end", 1, 7, 3, False), commits(1, 7, 3), begins(2, 8, 3, 11))
    lives = rank(2, begins(0, 7, 3, 20), ("end", 1, 7, 3, True), commits(1, 7, 3), begins(2, 8, 3, 21))
    assert account([heals, lives], end=1.5) == ({20: 1}, {10, 20})
    assert [(a.step, a.view, a.counts) for a in attempts(heals)] == [(7, 3, False), (8, 3, True)]


def test_samples_that_two_committed_steps_have_had_are_seen() -> None:
    again = rank(1, begins(0, 1, 1, 10), commits(1, 1, 1), begins(2, 2, 1, 10), commits(3, 2, 1), begins(4, 3, 1, 11))
    assert account([again], end=3.5)[0] == {10: 2}
