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


def test_a_candidate_without_known_members_tests_no_links(reach: ReachTests) -> None:
    assert reach.is_alone
    assert reach.due(0.0) is None
    reach.hear(None)
    assert not reach.is_alone
    assert reach.due(0.0) is None, "a line runs, but its members are not known yet"


def test_failed_reach_tests_are_retried_with_growing_pauses(reach: ReachTests) -> None:
    reach.hear([ONE])
    now, pauses = 100.0, []
    for _ in range(9):
        assert reach.due(now) == [ONE]
        pauses.append(reach.failed(now))
        assert reach.due(now + 0.99 * pauses[-1]) is None
        now += pauses[-1]
    assert pauses == [FIRST_PAUSE_S * 2**n for n in range(7)] + [LONGEST_PAUSE_S] * 2


def test_a_new_member_triggers_a_reach_test_at_once(reach: ReachTests) -> None:
    reach.hear([ONE])
    assert reach.due(100.0) == [ONE]
    reach.failed(100.0)
    for members in ([ONE], None):
        reach.hear(members)
        assert reach.due(100.1) is None
    reach.hear([ONE, TWO])
    assert reach.due(100.1) == [ONE, TWO]


def test_remaining_members_are_tested_at_once_after_a_member_ends(reach: ReachTests) -> None:
    reach.hear([ONE, TWO])
    reach.failed(100.0)
    reach.hear([ONE])
    assert reach.due(100.1) == [ONE]
    reach.failed(100.1)
    reach.hear([])
    assert reach.due(100.2) == [], "nobody is left to reach: the candidate may come in"


def test_retry_pauses_of_many_candidates_are_jittered() -> None:
    chance = random.Random(1)
    pauses = [ReachTests(chance).failed(0.0) for _ in range(100)]
    assert all(0.5 * FIRST_PAUSE_S <= pause <= FIRST_PAUSE_S for pause in pauses)
    assert max(pauses) - min(pauses) > 0.4 * FIRST_PAUSE_S
    again = random.Random(1)
    assert [ReachTests(again).failed(0.0) for _ in range(100)] == pauses


def test_members_under_test_are_not_tested_again() -> None:
    reach = ReachTests(random.Random(1))
    reach.hear([ONE])
    assert reach.due(0.0) == [ONE]
    reach.hear([ONE])
    assert reach.due(1.0) is None


def test_a_result_for_an_outdated_member_list_is_not_the_latest() -> None:
    reach = ReachTests(random.Random(1))
    reach.hear([ONE, TWO])
    before = reach.due(0.0)
    assert before is not None
    reach.hear([ONE])
    assert not reach.is_latest(before)
    latest = reach.due(0.0)
    assert latest == [ONE]
    assert reach.is_latest(latest)
