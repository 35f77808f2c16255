"""Bugs in how shares follow speeds: the simulation notices each.

What is expected is the kind of breach, not its seed: which schedule finds it first may change with any change.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from simulation.test_broken_rules import found
from simulation.test_schedules import BALANCED

from paceline._base.shares import equal_shares
from paceline._elastic.balance import Balance

ANY = ("mismatch", "I6", "liveness", "error")


def test_keeping_shares_in_the_next_generation_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer knows nothing of them."""

    def enter(balance: Balance, world: int) -> None:
        kept = balance.shares
        honest(balance, world)
        balance.shares = None if kept is None else (*kept, 1, 1, 1, 1)[:world]

    honest = Balance.enter
    monkeypatch.setattr(Balance, "enter", enter)
    assert found(200, BALANCED).startswith(ANY)


def test_shares_by_what_a_member_alone_has_measured_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def word(balance: Balance, rank: int, speed: float) -> list[float]:
        own[id(balance)] = speed
        return honest_word(balance, rank, speed)

    def hear(balance: Balance, step: int, speeds: Sequence[float]) -> bool:
        used = honest_hear(balance, step, speeds)
        if balance.shares is not None and own[id(balance)] < max(speeds):  # this one takes less than the others think
            balance.shares = equal_shares(balance._units, balance._world)
        return used

    own: dict[int, float] = {}
    honest_word, honest_hear = Balance.word, Balance.hear
    monkeypatch.setattr(Balance, "word", word)
    monkeypatch.setattr(Balance, "hear", hear)
    assert found(200, BALANCED).startswith(ANY)


def test_telling_speeds_by_the_clock_of_each_member_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_words(balance: Balance, step: int) -> bool:
        asked[id(balance)] = asked.get(id(balance), 0) + 1
        return honest(balance, step) or asked[id(balance)] % 5 == 0

    asked: dict[int, int] = {}
    honest = Balance.has_words
    monkeypatch.setattr(Balance, "has_words", has_words)
    assert found(200, BALANCED).startswith(ANY)
