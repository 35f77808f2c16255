"""Each rule of I1 and I2, broken on purpose, is found: so the other simulations mean something.

What is expected is the kind of breach, not its seed: which schedule finds it first may change with any change.
"""

from dataclasses import replace
from typing import Any

import pytest
from simulation import rounds
from simulation.checks import Broken
from simulation.coordinator import Coordinator
from simulation.disk import JOB
from simulation.runner import run
from simulation.world import Shape

from paceline.elastic.place import Meet, Phase, Place, Take, ViewNews
from paceline_server import meeting, policy
from paceline_server.events import ViewStored
from paceline_server.membership import Membership
from paceline_server.model import JobState, Met, Session, View
from paceline_server.storage.base import ViewFormed

HARSH = Shape(members=(2, 4), steps=(4, 8), faults=(3, 9))


def found(within: int) -> str:
    """The first breach that so many schedules show."""
    for seed in range(within):
        try:
            run(seed, HARSH)
        except Broken as broken:
            return str(broken).splitlines()[0]
    pytest.fail(f"{within} schedules did not find it")


def test_all_who_meet_may_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers too, whose state may be another line's, or none."""

    def convene(state: JobState) -> meeting.Meeting:
        decided = honest(state)
        if decided.over or decided.members or not decided.reason.startswith("generation"):
            return decided
        return decided if decided.base or not any(_has_tag(s) for s in state.present()) else _led_by_anyone(state)

    def _led_by_anyone(state: JobState) -> meeting.Meeting:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meeting, "_leads", lambda _view, session: _has_tag(session))
            return honest(state)

    honest = meeting.convene
    monkeypatch.setattr(policy, "convene", convene)
    assert found(2000).startswith(("I1", "I2", "two lines"))


def test_any_member_of_the_generation_may_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that did not get its base."""
    monkeypatch.setattr(meeting, "_leads", lambda _view, session: _has_tag(session))
    assert found(2000).startswith(("I1", "I2", "two lines"))


def test_states_are_compared_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal steps of two generations are not equal states."""

    def formed(place: Place, view: ViewNews) -> Meet | Take | None:
        if place.held is not None and view.base is not None and place.held.step == view.base.step:
            view = replace(view, base=place.held, newcomers=frozenset())
        return honest(place, view)

    honest = Place.formed
    monkeypatch.setattr(Place, "formed", formed)
    monkeypatch.setattr(Met, "state", property(lambda met: met.tag and met.tag.step))
    monkeypatch.setattr(meeting, "max", lambda tags: max(tags, key=lambda tag: tag.step), raising=False)
    assert found(3000).startswith(("I1", "I2", "I5", "two lines"))


def test_laggards_take_the_base_after_the_view_has_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a donor's death leaves members that hold all that counts, and may not use it."""

    def convene(state: JobState) -> meeting.Meeting:
        decided = honest(state)
        if not decided.laggards or decided.base is None:
            return decided
        for session in decided.laggards:
            lagging[session.member_id] = session.met
            session.met = replace(session.met, tag=decided.base)  # type: ignore[type-var]
        seated = honest(state)
        behind = [rank for rank, session in enumerate(seated.members) if session in decided.laggards]
        for session in decided.laggards:
            session.met = lagging[session.member_id]
        return replace(seated, laggards=(), newcomers=tuple(sorted({*seated.newcomers, *behind})))

    lagging: dict[str, Any] = {}
    honest = meeting.convene
    monkeypatch.setattr(policy, "convene", convene)
    assert found(12000).startswith("liveness")


def test_a_view_is_entered_with_something_newer_than_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    def formed(place: Place, view: ViewNews) -> Meet | Take | None:
        effect = honest(place, view)
        newer = place.held is not None and view.base is not None and place.held > view.base
        if isinstance(effect, Meet) and newer and view.generation == place.generation:
            place.phase = Phase.READY
            return None
        return effect

    honest = Place.formed
    monkeypatch.setattr(Place, "formed", formed)
    assert found(5000).startswith(("I1", "I5", "two lines", "liveness"))


def test_a_view_is_forgotten_whose_member_is_only_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_over(membership: Membership, view: View) -> bool:
        return len(membership.state.endings) >= len(view.seats)

    monkeypatch.setattr(Membership, "_line_is_over", is_over)
    assert found(3000).startswith(("I1", "I2", "two lines"))


def test_a_view_is_pushed_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def store(coordinator: Coordinator, view: View) -> None:
        coordinator.disk.write(ViewFormed(JOB, view))
        coordinator._world.moment("store")
        coordinator.receive(None, ViewStored(view.generation))

    monkeypatch.setattr(Coordinator, "_store_view", store)
    assert "I3" in found(5000)


def test_a_step_is_applied_that_not_all_gave_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "is_complete", lambda contributed, world: contributed >= max(1, world - 1))
    assert found(100).startswith("I1")


def test_an_interrupted_update_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "spoiled", lambda place: None)
    assert found(1000).startswith(("I5", "I6"))


@pytest.mark.slow
def test_a_newcomer_speaks_for_those_who_gave_it_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may never have heard of its generation, and have gone on in theirs."""
    monkeypatch.setattr(meeting, "_may_speak", _always)
    assert found(40000).startswith(("I1", "two lines"))


def _has_tag(session: Session) -> bool:
    return session.met is not None and session.met.tag is not None


def _always(*_: object) -> bool:
    return True
