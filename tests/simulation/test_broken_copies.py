"""Each rule of copies of shards, broken on purpose, is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation.group import Group
from simulation.state import State
from simulation.test_broken_rules import found
from simulation.test_schedules import COPIES

from paceline._elastic.recovery import StateRecovery
from paceline_protocol import Meet, MemberState


def test_keeping_no_copies_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateRecovery, "take_copies", lambda recovery: None)
    assert found(200, COPIES).startswith("I1")


def test_sending_no_gradients_to_copies_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "send_gradients", lambda state, group: None)
    assert found(5, COPIES).startswith("I5")


def test_taking_copies_after_the_first_word_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier shares are dropped when the first word is complete."""

    def send_gradients(state: State, group: Group) -> None:
        state.process.session._line._recovery.late()  # type: ignore[union-attr]
        honest(state, group)

    honest, takes = State.send_gradients, StateRecovery.take_copies
    monkeypatch.setattr(StateRecovery, "late", takes, raising=False)
    monkeypatch.setattr(StateRecovery, "take_copies", lambda recovery: None)
    monkeypatch.setattr(State, "send_gradients", send_gradients)
    assert found(200, COPIES, first=400).startswith("I1")


def test_counting_only_the_live_share_of_a_prepared_member_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can finish its copies too, of which the owner may have ended."""

    def meet(place: MemberState, *, unproven: bool = False) -> Meet:
        said = honest(place, unproven=unproven)
        return said if said.prepared is None else replace(said, shares=said.shares[:1])

    honest = MemberState.meet
    monkeypatch.setattr(MemberState, "meet", meet)
    assert found(400, COPIES).startswith(("I1", "I2", "liveness"))


def test_updating_copies_of_an_earlier_view_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "retire_copies", lambda state: None)
    assert found(100, COPIES).startswith(("I1", "I5"))


def test_finishing_a_step_without_its_copies_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(place: MemberState) -> Meet | None:
        if place._take is not None and place._take.finish:
            place.shares = place.shares[:1]
        return honest(place)

    honest = MemberState.took
    monkeypatch.setattr(MemberState, "took", took)
    assert found(400, COPIES).startswith(("I1", "I2", "I5", "liveness"))
