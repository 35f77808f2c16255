"""How long a killed worker and a new one held up the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from paceline.demo.progress import Recoveries, Recovery

Fact = Callable[[Recoveries], list[Recovery]]

KILL: list[list[Fact]] = [  # by worker: each worker's facts come in order
    [lambda r: r.formed(10, 2, 3, 1.0), lambda r: r.undone(10, 2, 5.010), lambda r: r.formed(10, 3, 2, 5.02),
     lambda r: r.applied(10, 3, 5.030)],
    [lambda r: r.formed(11, 2, 3, 1.0), lambda r: r.undone(11, 2, 5.008), lambda r: r.formed(11, 3, 2, 5.02),
     lambda r: r.applied(11, 3, 5.040)],
    [lambda r: r.formed(12, 2, 3, 1.0), lambda r: r.killing(12, 2, 2, 40, 5.0)],
]  # fmt: skip


def play(facts: list[Fact], recoveries: Recoveries) -> list[Recovery]:
    return [recovery for fact in facts for recovery in fact(recoveries)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_kill_is_measured_whoever_is_heard_first(order: tuple[int, ...]) -> None:
    recoveries = Recoveries()
    (found,) = play([fact for worker in order for fact in KILL[worker]], recoveries)
    assert found.cause == "killed"
    assert found.detect_ms == pytest.approx(8)
    assert found.recover_ms == pytest.approx(40)
    assert found.text == "rank 2 was killed in step 40; 2 workers went on after 40 ms"
    assert recoveries.found == [found]


def test_a_survivor_that_was_between_two_steps_knows_by_its_next_generation() -> None:
    recoveries = Recoveries()
    facts: list[Fact] = [
        lambda r: r.formed(10, 2, 2, 1.0),
        lambda r: r.formed(12, 2, 2, 1.0),
        lambda r: r.killing(12, 1, 2, 40, 5.0),
        lambda r: r.formed(10, 3, 1, 5.02),
        lambda r: r.applied(10, 3, 5.03),
    ]
    (found,) = play(facts, recoveries)
    assert (found.detect_ms, found.recover_ms) == (pytest.approx(20), pytest.approx(30))
    assert "1 worker went on" in found.text


def test_who_dies_meanwhile_is_not_waited_for() -> None:
    recoveries = Recoveries()
    assert not play([*KILL[2], *KILL[0], *KILL[1][:2]], recoveries)
    (found,) = recoveries.ended(11)
    assert found.text == "rank 2 was killed in step 40; 1 worker went on after 30 ms"


def test_a_new_worker_is_measured_once() -> None:
    recoveries = Recoveries()
    facts: list[Fact] = [
        lambda r: r.joined(13, 5.5, 6.0),
        lambda r: r.formed(13, 4, 3, 6.1),
        lambda r: r.applied(13, 4, 6.21),
        lambda r: r.applied(13, 4, 6.22),
    ]
    (found,) = play(facts, recoveries)
    assert found.as_dict() == {"cause": "joined", "detect_ms": 500.0, "recover_ms": 210.0}
    assert found.text == "a new worker joined; 3 train on after 210 ms"
