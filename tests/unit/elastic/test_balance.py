"""Balanced shares: the best division, and when members change theirs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline._base.shares import Shares
from paceline._elastic.balance import Balance, divide, times
from paceline._elastic.state import StateCore
from paceline.errors import UnsupportedOp


def balance(world: int = 2, units: int = 16) -> Balance:
    """That of a generation in which a word has passed, when no speed was known."""
    made = Balance(lambda _: units)
    made.enter(world)
    hear(made, [0.0] * world)
    assert made.shares is None
    return made


def hear(made: Balance, *words: Sequence[float]) -> list[Shares | None]:
    """The shares after each word, of the next step that has one."""
    found = []
    for speeds in words:
        made.hear(next(step for step in count(1) if made.has_words(step)), speeds)
        found.append(made.shares)
    return found


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=4), st.integers(0, 8))
@settings(deadline=None)
def test_no_other_division_has_a_faster_slowest_rank(speeds: list[float], more: int) -> None:
    units = len(speeds) + more
    shares = divide(speeds, units)
    assert (sum(shares), min(shares) >= 1) == (units, True)
    others = (each for each in itertools.product(range(1, units + 1), repeat=len(speeds)) if sum(each) == units)
    assert max(times(shares, speeds)) == min(max(times(other, speeds)) for other in others)


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=40), st.integers(0, 1000))
@settings(deadline=None)
def test_any_speeds_give_each_rank_a_unit(speeds: list[float], more: int) -> None:
    shares = divide(speeds, len(speeds) + more)
    assert (sum(shares), min(shares) >= 1) == (len(speeds) + more, True)


def test_a_slow_rank_gets_less_after_two_words() -> None:
    made = balance()
    assert hear(made, [10.0, 5.0], [10.0, 5.0]) == [None, (11, 5)]
    assert hear(made, [10.0, 5.0], [10.0, 5.0]) == [(11, 5), (11, 5)], "they are right now"


def test_words_without_all_speeds_are_left_out() -> None:
    assert hear(balance(), [10.0, 5.0], [10.0, 0.0], [0.0, 5.0], [10.0, 5.0]) == [None, None, None, (11, 5)]


def test_shares_become_equal_again() -> None:
    made = balance()
    hear(made, [10.0, 5.0], [10.0, 5.0])
    assert hear(made, [10.0, 10.0], [10.0, 10.0]) == [(11, 5), (8, 8)]


def test_shares_change_though_another_of_the_slow_ranks_is_the_slowest() -> None:
    made = balance(4, 64)
    assert hear(made, [10.0, 10.1, 5.0, 5.1], [10.1, 10.0, 5.1, 5.0]) == [None, (22, 21, 11, 10)]


@pytest.mark.parametrize(
    "words",
    [
        ([10.0, 9.0], [10.0, 9.0]),  # 15 of 16 units take as long on the slower one
        ([10.0, 5.0], [5.0, 10.0], [10.0, 5.0]),  # the slow rank is another one each time
        ([10.0, 5.0], [10.0, 10.0], [10.0, 5.0]),
        ([10.0, 0.0], [10.0, 0.0]),  # a newcomer has measured nothing
        ([10.0, math.inf], [10.0, math.inf]),
        ([10.0, math.nan], [10.0, math.nan]),
    ],
    ids=["little to gain", "another rank", "once", "not known", "infinite", "not a number"],
)
def test_shares_stay_equal(words: tuple[list[float], ...]) -> None:
    assert not any(hear(balance(), *words))


def test_a_generation_begins_with_equal_shares() -> None:
    made = balance()
    hear(made, [10.0, 5.0], [10.0, 5.0])
    made.enter(3)
    assert made.shares is None
    assert hear(made, [10.0, 5.0, 5.0]) == [None], "this is the first of two words"


def test_words_are_told_in_the_first_step_and_in_every_fourth_one_after_it() -> None:
    made = Balance(lambda _: 16)
    made.enter(2)
    told = []
    for step in range(7, 20):
        if made.has_words(step):
            told.append(step)
            made.hear(step, [1.0, 1.0])
    assert told == [7, 11, 15, 19]


def test_a_worker_alone_tells_no_speed() -> None:
    made = Balance(lambda _: 16)
    made.enter(1)
    assert not any(made.has_words(step) for step in range(1, 20))


@pytest.mark.parametrize("units", [1, 2])
def test_shares_stay_equal_if_there_are_no_more_units_than_ranks(units: int) -> None:
    assert not any(hear(balance(units=units), *[[10.0, 1.0]] * 3))


def stragglers(made: Balance, *words: Sequence[float]) -> list[int | None]:
    """The straggler after each word."""
    found = []
    for word in words:
        hear(made, word)
        found.append(made.straggler)
    return found


def test_a_rank_that_takes_five_times_as_long_in_two_words_is_a_straggler() -> None:
    slow = [9.0, 1.7, 8.0, 9.0]
    assert stragglers(balance(4, 4), slow, slow, [9.0, 1.9, 8.0, 9.0]) == [None, 1, None]


def test_of_two_workers_the_slow_one_is_a_straggler() -> None:
    assert stragglers(balance(2, 2), [10.0, 1.9], [10.0, 1.9]) == [None, 1]


def test_of_two_stragglers_the_slowest_is_named() -> None:
    assert stragglers(balance(5, 5), *[[9.0, 1.0, 0.5, 9.0, 9.0]] * 2) == [None, 2]


def test_a_rank_that_was_not_slow_in_between_is_no_straggler() -> None:
    slow, between = [9.0, 1.0, 9.0], [9.0, 8.0, 9.0]
    assert stragglers(balance(3, 3), slow, between, slow) == [None] * 3
    assert stragglers(balance(3, 3), slow, [9.0, 0.0, 9.0], slow) == [None, None, 1], "a word without all speeds"


def test_a_straggler_is_named_when_its_share_shrinks() -> None:
    made, slow = balance(2, 8), [100.0, 5.0]
    assert stragglers(made, slow, slow, slow) == [None, 1, None], "then it holds up nobody"
    assert made.shares == (7, 1)


def test_a_new_generation_forgets_stragglers() -> None:
    made, slow = balance(3, 3), [9.0, 1.0, 9.0]
    stragglers(made, slow)
    made.enter(3)
    assert stragglers(made, slow) == [None]


@given(st.floats(1.0, 4.5), st.floats(0.0, 5.0), st.integers(3, 8))
@settings(deadline=None)
def test_smaller_shares_make_no_straggler_of_a_slow_rank(slowness: float, fixed: float, world: int) -> None:
    """A step has a part that takes as long for any share, so a rank with a small share measures a low speed."""
    made, units = balance(world, 16 * world), 16
    for _ in range(30):
        shares = made.shares or (units,) * world
        each = [(slowness if rank == 0 else 1.0) * (fixed + 0.1 * share) for rank, share in enumerate(shares)]
        hear(made, [share / seconds for share, seconds in zip(shares, each, strict=True)])
        assert made.straggler is None


def test_a_word_fills_its_own_place() -> None:
    made = balance(3)
    assert [sum(column) for column in zip(*(made.word(rank, rank + 1.5) for rank in range(3)), strict=True)] == [
        1.5,
        2.5,
        3.5,
    ]


def test_balance_without_a_sampler_is_refused() -> None:
    with paceline.join() as session, pytest.raises(UnsupportedOp, match="balance=True without a sampler"):
        session.steps(paceline.TrainState(notes={}), total=1, balance=True)


def test_balance_with_more_microbatches_than_samples_is_refused() -> None:
    state = paceline.TrainState(notes={}, sampler=paceline.ElasticSampler(100, 4, microbatches=8))
    text = "balance=True with 8 microbatches of 4 samples: a rank may get only empty ones"
    with paceline.join() as session, pytest.raises(UnsupportedOp, match=text):
        session.steps(state, total=1, balance=True)


def test_a_second_loop_measures_speeds_anew() -> None:
    with paceline.join() as session:
        counters = session.group._core.counters
        counters._speeds, counters.share = (1.0, 2.0, 3.0), 0.5
        session.steps(paceline.TrainState(notes={}), total=1)
        assert (session.stats()["speed"], session.stats()["share"]) == (0.0, 0.0)


def test_balance_with_a_model_on_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateCore, "is_on_device", True)
    state = paceline.TrainState(notes={}, sampler=paceline.ElasticSampler(10, 4))
    with paceline.join() as session, pytest.raises(UnsupportedOp, match="balance=True with a model on a GPU"):
        session.steps(state, total=1, balance=True)


def test_asking_for_stragglers_to_leave_without_balance_is_said_to_have_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PACELINE_DRAIN_STRAGGLERS", "1")
    with paceline.join() as session:
        session.steps(paceline.TrainState(notes={}), total=1)
    assert "no straggler will be drained: that needs session.steps(..., balance=True)" in caplog.text
