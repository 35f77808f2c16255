"""Crossing off whom a meeting waits for gives the same as convening the meeting anew, in many schedules."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.broken import Broken
from simulation.runner import run
from simulation.world import Shape

from paceline_protocol import Meet, _meeting
from paceline_protocol._lineage import Lineage
from paceline_protocol._policy import decide
from paceline_protocol.coordinator import Effect, Session

CROWD = Shape(members=(5, 8), faults=(3, 8))
SPREAD = Shape(members=(3, 5), faults=(2, 7), node_size=0)
"""Here members say again what they hold before they have taken the base."""

SHAPES = [CROWD, SPREAD, Shape(members=(4, 6), faults=(2, 7), node_size=2)]


def crossings(monkeypatch: pytest.MonkeyPatch, seeds: range, shapes: list[Shape]) -> Counter[str]:
    """Runs schedules; how often members were crossed off, by what they were waited for."""
    seen: Counter[str] = Counter()
    real = Lineage._cross_off

    def cross_off(line: Lineage, now: float, session: Session, before: Meet | None) -> list[Effect] | None:
        effects = real(line, now, session, before)
        if effects is not None:
            caught = session.catching_up
            session.catching_up = False  # it has been told to take the base, again, only after this was decided
            anew = decide(now, line._state, line._settings.settle_time)
            session.catching_up = caught
            _compare(line, anew, session)
            seen["late" if anew.meeting is not None and anew.meeting.late else "again" if caught else "laggard"] += 1
        return effects

    def _compare(line: Lineage, anew: object, session: Session) -> None:
        crossed = line.decision
        same = (crossed.reason, crossed.members, crossed.again_at, crossed.summon)
        other = (anew.reason, anew.members, anew.again_at, anew.summon)  # type: ignore[attr-defined]
        meeting = anew.meeting  # type: ignore[attr-defined]
        assert line._awaited is not None
        left = set(line._awaited)
        if same != other or left != set(meeting.late or meeting.laggards):
            raise Broken(f"{crossed.reason!r} was {other[0]!r} when the meeting was convened anew")
        before = line._awaited.meeting
        if (before.base, before.manifest, before.targets) != (meeting.base, meeting.manifest, meeting.targets):
            raise Broken("another base, or other seats")

    monkeypatch.setattr(Lineage, "_cross_off", cross_off)
    for shape in shapes:
        for seed in seeds:
            run(seed, shape)
    return seen


@pytest.mark.slow
def test_crossing_off_members_decides_like_a_new_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = crossings(monkeypatch, range(800_000, 800_030), SHAPES)
    assert min(seen["late"], seen["laggard"]) > 100, seen
    assert seen["again"] > 3, seen


@pytest.mark.slow
def test_crossing_off_a_member_too_soon_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_caught_up(*_: object) -> bool:
        return True

    monkeypatch.setattr(_meeting, "has_caught_up", has_caught_up)
    with pytest.raises(Broken, match="when the meeting was convened anew"):
        crossings(monkeypatch, range(800_000, 800_100), [SPREAD])
