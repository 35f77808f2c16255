"""Ranges of samples and microbatches: they cover everything once, in order, whatever the shares are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline._base.shares import range_of


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 500))
def test_ranges_cover_all_items_once_in_rank_order(shares: list[int], size: int) -> None:
    for given_shares in (None, tuple(shares)):
        ranges = [range_of(rank, len(shares), size, given_shares) for rank in range(len(shares))]
        assert [number for lo, hi in ranges for number in range(lo, hi)] == list(range(size))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_a_batch_is_divided_by_the_shares_of_the_ranks(shares: list[int]) -> None:
    units = sum(shares)
    ranges = [range_of(rank, len(shares), units, tuple(shares)) for rank in range(len(shares))]
    assert [hi - lo for lo, hi in ranges] == shares


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 300))
def test_equal_shares_give_the_ranges_of_no_shares(world: int, each: int, size: int) -> None:
    for rank in range(world):
        assert range_of(rank, world, size, (each,) * world) == range_of(rank, world, size)
