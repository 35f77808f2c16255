"""Schedules in which jobs of a few members are decided as seldom as those of thousands: the invariants hold, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation import coordinator
from simulation.runner import run
from simulation.test_schedules import AWAY, DISKS, FIXED, HOSTS, LATE, PAIRS, SEEN, SMALL, SPREAD, STUCK

from paceline_protocol._lineage import Lineage
from paceline_protocol.coordinator import Effect, Session

SHAPES = [
    SMALL,
    PAIRS,
    SPREAD,
    replace(HOSTS, faults=(3, 8)),
    AWAY,
    replace(FIXED, claimed=True),
    STUCK,
    DISKS,
    LATE,
    replace(SEEN, zombies=True),
    replace(SPREAD, drains=True),
    replace(AWAY, node_size=2),
]


def postponed(monkeypatch: pytest.MonkeyPatch, seeds: range, pace: float) -> int:
    """Runs schedules; how often a decision was postponed.

    Args:
        monkeypatch: sets the pace.
        seeds: of the schedules, for each shape.
        pace: seconds for each member between two decisions.
    """
    times = 0
    real = Lineage.reconsider

    def reconsider(line: Lineage, now: float, newcomer: Session | None = None) -> list[Effect]:
        nonlocal times
        effects = real(line, now, newcomer)
        times += line._undecided
        return effects

    monkeypatch.setattr(coordinator, "SETTINGS", replace(coordinator.SETTINGS, pace=pace))
    monkeypatch.setattr(Lineage, "reconsider", reconsider)
    for number, shape in enumerate(SHAPES):
        for seed in seeds:
            run(seed + 1_000 * number, shape)
    return times


@pytest.mark.parametrize("pace", [0.002, 0.02])  # 5,000 members have a pause of 0.1 s
def test_a_job_with_paced_decisions_finishes(monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    assert postponed(monkeypatch, range(810_000, 810_004), pace) > 300


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_more_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert postponed(monkeypatch, range(810_100, 810_140), 0.01) > 3_000
