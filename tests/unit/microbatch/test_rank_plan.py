"""The plan of a repaired step: which sums are kept, who computes the rest, and that the tree stays whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._base.shares import range_of
from paceline._microbatch.rank_plan import RankPlan, held_of_row, plan_ranks, row_of_held, usual_plan
from paceline._microbatch.sum_tree import Node, joined, maximal_subtrees, subtrees_by_rank


@st.composite
def holdings(draw: st.DrawFn) -> tuple[tuple[tuple[Node, ...], ...], int]:
    """Microbatches that ranks may hold: any, summed up as far as the tree allows; several may hold the same."""
    world = draw(st.integers(1, 9))
    microbatches = draw(st.integers(world, 40))
    numbers = st.sets(st.integers(0, microbatches - 1))
    held = [joined([(v, v + 1) for v in draw(numbers)], microbatches) for _ in range(world)]
    return tuple(held), microbatches


def of(nodes: tuple[Node, ...]) -> list[int]:
    """The microbatches of nodes."""
    return [number for node in nodes for number in range(*node)]


def computed(shares: tuple[RankPlan, ...]) -> list[int]:
    """The microbatches that count, of all ranks."""
    return [number for share in shares if not share.repeats for number in share.numbers]


@given(holdings())
@settings(deadline=None, max_examples=300)
def test_each_microbatch_is_kept_once_or_computed_once(found: tuple[tuple[tuple[Node, ...], ...], int]) -> None:
    held, microbatches = found
    shares = plan_ranks(held, microbatches)
    kept = [number for share in shares for number in of(share.kept)]
    assert sorted(kept + computed(shares)) == list(range(microbatches))
    assert set(kept) == {number for nodes in held for number in of(nodes)}, "what one of them holds is not lost"
    for share, own in zip(shares, held, strict=True):
        assert set(share.kept) <= set(own), "a rank keeps what it has"
        mine = () if share.repeats else tuple((number, number + 1) for number in share.numbers)
        assert share.nodes[share.rank] == joined([*share.kept, *mine], microbatches)
        assert share.nodes == shares[0].nodes, "all ranks have one plan"
        assert (share.root == share.rank) == (0 in of(share.nodes[share.rank]))


@given(holdings())
@settings(deadline=None, max_examples=300)
def test_missing_microbatches_are_spread_evenly_over_ranks(found: tuple[tuple[tuple[Node, ...], ...], int]) -> None:
    held, microbatches = found
    shares = plan_ranks(held, microbatches)
    counts = [0 if share.repeats else len(share.numbers) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all(share.numbers for share in shares), "each has a turn, so that its loop leads to the collectives"
    assert all(len(share.numbers) == 1 for share in shares if share.repeats)
    assert computed(shares) == sorted(computed(shares)), "ranges from left to right"


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9))
@settings(deadline=None)
def test_unequal_shares_give_each_rank_a_range_of_its_length(counts: list[int]) -> None:
    microbatches, shares = sum(counts), tuple(counts)
    plans = [usual_plan(rank, len(counts), microbatches, shares) for rank in range(len(counts))]
    assert [len(plan.numbers) for plan in plans] == counts
    assert computed(tuple(plans)) == list(range(microbatches))
    for plan in plans:
        lo, hi = plan.numbers[0], plan.numbers[-1] + 1
        assert plan.nodes[plan.rank] == maximal_subtrees(lo, hi, microbatches)
        assert plan.nodes == plans[0].nodes


@given(holdings())
@settings(deadline=None)
def test_held_nodes_survive_a_round_trip_through_a_row(found: tuple[tuple[tuple[Node, ...], ...], int]) -> None:
    held, microbatches = found
    assert tuple(held_of_row(row_of_held(nodes, microbatches)) for nodes in held) == held


def test_a_row_can_encode_the_refusal_of_sums() -> None:
    assert held_of_row(row_of_held(None, 3)) is None


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 9), min_size=1, max_size=8))
@settings(deadline=None, max_examples=300)
def test_any_row_decodes_to_disjoint_nodes_or_raises_value_error(row: list[int]) -> None:
    try:
        nodes = held_of_row(np.array(row))
    except ValueError:
        return
    if nodes is None:
        return
    assert of(nodes) == sorted(set(of(nodes)))
    assert all(maximal_subtrees(*node, len(row)) == (node,) for node in nodes)


@pytest.mark.parametrize(
    "row", [[0, 3, 0, 0], [5, 0, 0, 0], [4, 2, 0, 0], [0, 0, 2, 0], [0, 1, 0, 0], [-1, 0, 0, 0], [1 << 60, 0, 0, 0]]
)
def test_an_invalid_row_of_held_nodes_is_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="not a node of 4, or overlap"):
        held_of_row(np.array(row))


@pytest.mark.parametrize(("world", "microbatches"), [(1, 1), (1, 8), (3, 8), (4, 16), (5, 7), (8, 8)])
def test_even_plan_gives_each_rank_its_own_range(world: int, microbatches: int) -> None:
    for rank in range(world):
        share = usual_plan(rank, world, microbatches)
        assert share.numbers == tuple(range(*range_of(rank, world, microbatches)))
        assert share.nodes == subtrees_by_rank(world, microbatches)
        assert (share.kept, share.repeats, share.root) == ((), False, 0)


def test_plan_after_the_death_of_one_rank_of_four() -> None:
    """Rank 2 of 4 dies when each has two of its four microbatches, and the last one three."""
    shares = plan_ranks((((0, 2),), ((4, 6),), ((12, 14), (14, 15))), 16)
    assert [share.numbers for share in shares] == [(2, 3, 6), (7, 8, 9), (10, 11, 15)]
    assert [share.kept for share in shares] == [((0, 2),), ((4, 6),), ((12, 14), (14, 15))]
    assert shares[0].nodes == (((0, 4), (6, 7)), ((4, 6), (7, 8), (8, 10)), ((10, 12), (12, 16)))


def test_a_duplicate_node_is_kept_once_and_the_largest_node_wins() -> None:
    shares = plan_ranks((((0, 2), (4, 5)), ((0, 2),), ((4, 8),)), 8)
    assert [share.kept for share in shares] == [((0, 2),), (), ((4, 8),)]
    assert [(share.numbers, share.repeats) for share in shares] == [((0,), True), ((2,), False), ((3,), False)]
    assert shares[0].root == 0


def test_fewer_microbatches_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="1 microbatches for 2 ranks"):
        plan_ranks(((), ()), 1)
