"""The result of the demo, and what must be true of it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.demo import as_result, faults
from paceline.demo.ledger import Ledger


def ledger(*, killed: bool = False, joined: bool = False, accuracy: float = 0.97219) -> Ledger:
    where: dict[str, Any] = {"generation": 2, "world": 1}
    end = {"digest": "a", "accuracy": accuracy, "world_size": 1, "steps": 2, "steps_per_epoch": 1, "samples": 1}
    notes = [{"joined": True, "at": 0.0}]
    for step in (1, 2):
        notes += [{**where, "step": step, "took": [0], "at": 0.5}, {**where, "step": step, "applied": True, "at": 1.0}]
    dead = [{"joined": True, "at": 0.0}, {"step": 1, "generation": 1, "killed": 1, "at": 0.9}]
    new = [{"joined": True, "at": 2.0}, {**where, "step": 2, "applied": True, "at": 2.1}]
    workers = [[*notes, {**end, "seconds": 1.23456}]] + [dead] * killed + [new] * joined
    return Ledger(workers)


def test_as_result_has_the_documented_keys() -> None:
    assert as_result(ledger(killed=True, joined=True)) == {
        "accuracy": 0.9722,
        "steps": 2,
        "world_size": 1,
        "generations": 1,
        "recoveries": [{"cause": "killed", "recover_ms": 100.0}, {"cause": "joined", "recover_ms": 100.0}],
        "samples_once": True,
        "seconds": 1.235,
    }


@pytest.mark.parametrize(
    ("run", "kill", "words"),
    [
        ({}, False, []),
        ({"killed": True, "joined": True}, True, []),
        ({"accuracy": 0.9}, False, ["the accuracy is below 95%: training failed"]),
        ({"joined": True}, True, ["the others did not go on after a worker was killed"]),
        ({"killed": True}, True, ["training ended before a new worker had joined"]),
    ],
)
def test_faults_name_each_failed_expectation_of_the_demo(run: dict[str, Any], kill: bool, words: list[str]) -> None:
    assert faults(ledger(**run), kill=kill) == words


def test_a_run_without_a_result_is_a_fault() -> None:
    assert faults(Ledger([]), kill=False) == ["the workers ended without a result"]
