"""Each rule that keeps the ranks of replicas together, broken on purpose, is found.

What is expected is the kind of breach, not its seed: which schedule finds it first may change with any change.
"""

from dataclasses import replace
from typing import Any

import pytest
from simulation import replicas
from simulation.broken import Broken
from simulation.runner import run
from simulation.world import Shape

from paceline._elastic.mates import Mates
from paceline._elastic.rounds import Point
from paceline_protocol import StepFlag, _departures, _lineage, _meeting
from paceline_protocol.coordinator import JobState, Session

HARSH = Shape(members=(2, 3), faults=(3, 9), replica_size=2)
DRAINS = replace(HARSH, drains=True)


def found(within: int, shape: Shape = HARSH, *, first: int = 0) -> str:
    """The first breach that so many schedules show; rare ones are looked for from a seed that is known to be near."""
    for seed in range(first, first + within):
        try:
            run(seed, shape)
        except Broken as broken:
            return str(broken).splitlines()[0]
    pytest.fail(f"{within} schedules did not find it")


def test_the_simulation_fails_if_incomplete_replicas_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_meeting, "whole", list)
    monkeypatch.setattr(JobState, "present", JobState.of_view)
    monkeypatch.setattr(_meeting, "of_one_mind", list)
    assert found(100).startswith(("whole", "liveness"))


def test_leaving_the_mates_of_a_dead_rank_alone_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator knew the dead rank, so the others need not wait until their launcher, or a timeout, ends them."""
    monkeypatch.setattr(_departures.Departures, "end_mates", lambda departures, *_: [])
    monkeypatch.setattr(replicas, "_LAUNCHER_S", 30.0)  # most schedules are over sooner than in the usual 40 s
    assert found(100, first=80).startswith("mates")


def test_entering_a_step_without_the_mates_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one is alone in a collective of the model."""
    honest = Mates.go

    def go(mates: Mates, point: Point, *flags: StepFlag) -> StepFlag | None:
        return StepFlag(0) if point is Point.BEGIN else honest(mates, point, *flags)

    monkeypatch.setattr(Mates, "go", go)
    assert found(100).startswith("mates")


def test_opening_the_gate_without_the_mates_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one applies a step that another one undoes."""
    honest = Mates.go

    def go(mates: Mates, point: Point, *flags: StepFlag) -> StepFlag | None:
        return flags[0] if flags else honest(mates, point)

    monkeypatch.setattr(Mates, "go", go)
    assert found(300).startswith(("mates", "I1", "I5", "I6"))


def test_stopping_without_a_word_to_the_mates_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mates, "_tell", lambda mates, word: None)
    assert found(200).startswith(("mates", "liveness"))


def test_letting_one_rank_leave_without_its_mates_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def leavers(sessions: Any) -> set[Session]:
        return {session for session in sessions if session.met is not None and session.met.leaving}

    for module in (_meeting, _lineage):
        monkeypatch.setattr(module, "leavers", leavers)
    assert found(300, DRAINS).startswith(("mates", "liveness", "error", "whole", "I"))
