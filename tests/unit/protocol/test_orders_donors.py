"""Which donors are named to a laggard: a few, others for each laggard, all of them in the end, and every part."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from unit.protocol.meeting import BASE, job

from paceline_protocol import Meet, Share
from paceline_protocol._orders import Donors
from paceline_protocol.coordinator import Session


def holders(count: int, parts: int = 1) -> list[Session]:
    mets = [Meet(7, BASE, True, shares=(Share(rank % parts, parts),), node_size=parts) for rank in range(count)]
    return list(job(list(mets)).sessions.values())


def named(donors: Donors, session: Session, turn: int) -> list[str]:
    return [seat.member_id for seat, _ in donors.some(session, turn)]


@pytest.mark.parametrize("count", [17, 24, 31, 100, 500])
def test_every_donor_is_named_equally_often(count: int) -> None:
    *there, laggard = holders(count + 1)
    donors = Donors(there)
    times = Counter(name for turn in range(count) for name in named(donors, laggard, turn))
    assert set(times.values()) == {16}
    assert len(times) == count


def test_the_next_turn_names_other_donors() -> None:
    *there, laggard = holders(101)
    donors = Donors(there)
    first, second = (named(donors, laggard, turn) for turn in (0, 1))
    assert len({*first, *second}) == 32


def test_sixteen_donors_are_all_named() -> None:
    there = holders(16)
    assert len(named(Donors(there), there[0], 5)) == 16


def test_named_donors_are_evenly_spread_over_the_ranks() -> None:
    *there, laggard = holders(129)
    ranks = sorted(int(name[1:]) for name in named(Donors(there), laggard, 3))
    assert {later - rank for rank, later in pairwise(ranks)} == {8}


def test_donors_without_a_stream_are_named_only_if_all_lack_one() -> None:
    *there, laggard = holders(40)
    for session in there[1:]:
        session.stream = None
    assert named(Donors(there), laggard, 3) == ["m0"]
    there[0].stream = None
    assert len(named(Donors(there), laggard, 3)) == 16


def test_donors_cover_every_part_and_include_a_laggard_with_a_part() -> None:
    there = holders(800, parts=8)
    donors = Donors(there)
    shares = [share for _, held in donors.some(there[799], 0) for share in held]
    assert set(Counter(shares).values()) <= {2, 3}
    assert {share.part for share in shares} == set(range(8))
    assert "m799" in named(donors, there[799], 0)


def test_all_donors_are_named_if_each_holds_a_different_part() -> None:
    there = holders(100, parts=100)
    assert len(named(Donors(there), there[0], 7)) == 100
