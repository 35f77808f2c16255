"""When a candidate tries whether it reaches a line: at once, then later and later, and at once for whoever is new."""

from __future__ import annotations

import random

import pytest

from paceline._elastic.waiting import FIRST_PAUSE_S, LONGEST_PAUSE_S, ReachTests
from paceline._links.base import Peer

ONE, TWO = (Peer(rank, f"member-{rank}", f"host-{rank}", f"10.0.0.{rank}:1", 7) for rank in (1, 2))


class NoChance(random.Random):
    """Every pause is as long as it can be."""

    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


@pytest.fixture
def reach() -> ReachTests:
    return ReachTests(NoChance())


def test_who_is_alone_has_nobody_to_try(reach: ReachTests) -> None:
    assert reach.is_alone
    assert reach.due(0.0) is None
    reach.hear(None)
    assert not reach.is_alone
    assert reach.due(0.0) is None, "a line runs, but its members are not known yet"


def test_members_are_tried_at_once_and_then_later_and_later(reach: ReachTests) -> None:
    reach.hear([ONE])
    now, pauses = 100.0, []
    for _ in range(9):
        assert reach.due(now) == [ONE]
        pauses.append(reach.failed(now))
        assert reach.due(now + 0.99 * pauses[-1]) is None
        now += pauses[-1]
    assert pauses == [FIRST_PAUSE_S * 2**n for n in range(7)] + [LONGEST_PAUSE_S] * 2


def test_a_member_that_is_new_is_tried_at_once(reach: ReachTests) -> None:
    reach.hear([ONE])
    assert reach.due(100.0) == [ONE]
    reach.failed(100.0)
    for members in ([ONE], None):
        reach.hear(members)
        assert reach.due(100.1) is None
    reach.hear([ONE, TWO])
    assert reach.due(100.1) == [ONE, TWO]


def test_the_others_are_tried_at_once_when_a_member_has_ended(reach: ReachTests) -> None:
    reach.hear([ONE, TWO])
    reach.failed(100.0)
    reach.hear([ONE])
    assert reach.due(100.1) == [ONE]
    reach.failed(100.1)
    reach.hear([])
    assert reach.due(100.2) == [], "nobody is left to reach: the candidate may come in"


def test_many_that_fail_together_do_not_try_again_together() -> None:
    chance = random.Random(1)
    pauses = [ReachTests(chance).failed(0.0) for _ in range(100)]
    assert all(0.5 * FIRST_PAUSE_S <= pause <= FIRST_PAUSE_S for pause in pauses)
    assert max(pauses) - min(pauses) > 0.4 * FIRST_PAUSE_S
    again = random.Random(1)
    assert [ReachTests(again).failed(0.0) for _ in range(100)] == pauses


def test_members_that_are_being_tried_are_not_tried_again() -> None:
    reach = ReachTests(random.Random(1))
    reach.hear([ONE])
    assert reach.due(0.0) == [ONE]
    reach.hear([ONE])
    assert reach.due(1.0) is None


def test_what_became_of_a_list_that_has_changed_since_says_nothing() -> None:
    reach = ReachTests(random.Random(1))
    reach.hear([ONE, TWO])
    before = reach.due(0.0)
    assert before is not None
    reach.hear([ONE])
    assert not reach.is_latest(before)
    latest = reach.due(0.0)
    assert latest == [ONE]
    assert reach.is_latest(latest)
