"""Sums of microbatches have the bits of one fixed tree, for any world, size, schedule and length of frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._base.shares import range_of
from paceline._group import Group
from paceline._microbatch.sum_tree import joined, maximal_subtrees, split_of, subtrees_by_rank
from paceline.errors import CollectiveMismatch, SizeMismatch, UnsupportedOp
from paceline.testing import run_groups
from support.collective_calls import BF16, bits, groups_by, quick, random_values

F4, F8 = np.dtype("f4"), np.dtype("f8")


def tree(leaves: list[Any], lo: int = 0, hi: int | None = None) -> Any:
    """What the sum must be, bit for bit."""
    hi = len(leaves) if hi is None else hi
    if hi - lo == 1:
        return leaves[lo]
    middle = split_of((lo, hi))
    with np.errstate(all="ignore"):
        return tree(leaves, lo, middle) + tree(leaves, middle, hi)


def terms_of(leaves: list[Any], rank: int, world: int) -> list[Any]:
    count = len(leaves)
    return [tree(leaves, *node).copy() for node in maximal_subtrees(*range_of(rank, world, count), count)]


@pytest.mark.parametrize("schedule", ["star", "direct"])
@quick(max_examples=40)
@given(data=st.data(), world=st.integers(1, 6), dtype=st.sampled_from([F4, F8]))
def test_all_reduce_tree_has_the_bits_of_the_tree_in_every_world(
    schedule: str, data: Any, world: int, dtype: Any
) -> None:
    count = data.draw(st.integers(world, 16))
    n = data.draw(st.sampled_from([0, 1, 5, 53, 700]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    leaves = [random_values(rng, n, dtype) for _ in range(count)]
    divisor = data.draw(st.sampled_from([None, 3.0]))
    with np.errstate(all="ignore"):
        expected = tree(leaves)
        expected = expected if divisor is None else expected / dtype.type(divisor)

    def rank(group: Group) -> bytes:
        terms = terms_of(leaves, group.rank, world)
        kept = [term.copy() for term in terms[:-1]]
        out = terms[-1] if data_in_place else np.empty(n, dtype)
        ask = None if divisor is None else (lambda: divisor)
        result = group._core.all_reduce_tree(terms, leaves=count, out=out, divisor=ask)
        assert result is out
        assert [bits(term) for term in terms[:-1]] == [bits(term) for term in kept]
        return bits(result)

    data_in_place = data.draw(st.booleans())
    groups = groups_by(world, "all_reduce", schedule, data.draw(st.sampled_from([64, 1 << 20])))
    results = run_groups(groups, rank, timeout=20)
    assert set(results) == {bits(expected)}


def test_all_reduce_tree_of_a_long_array_has_the_bits_of_the_tree() -> None:
    rng = np.random.default_rng(3)
    leaves = [rng.standard_normal(100_003).astype("f4") for _ in range(8)]
    for world in (3, 4):
        results = run_groups(
            groups_by(world, "all_reduce", "direct"),
            lambda group, world=world: bits(
                group._core.all_reduce_tree(terms := terms_of(leaves, group.rank, world), leaves=8, out=terms[-1])
            ),
        )
        assert set(results) == {bits(tree(leaves))}


@pytest.mark.parametrize("dtype", [F4, F8, np.dtype("f2"), BF16, np.dtype("i4")], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_order_tree_sums_as_a_tree_over_the_ranks(world: int, dtype: Any) -> None:
    rng = np.random.default_rng(world)
    xs = [(rng.standard_normal(91) * 50).astype(dtype) for _ in range(world)]
    wide = [x.astype("f4") if dtype.itemsize == 2 else x for x in xs]
    expected = tree(wide).astype(dtype)
    results = run_groups(
        groups_by(world, "all_reduce", "ring"), lambda group: bits(group.all_reduce(xs[group.rank], order="tree"))
    )
    assert set(results) == {bits(expected)}


@pytest.mark.parametrize("collective", ["reduce", "reduce_scatter"])
def test_reduce_and_reduce_scatter_support_order_tree(collective: str) -> None:
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(30).astype("f4") for _ in range(5)]
    results = run_groups(
        groups_by(5, "all_reduce", "ring"), lambda group: getattr(group, collective)(xs[group.rank], order="tree")
    )
    found = results[0] if collective == "reduce" else np.concatenate(results)
    assert bits(found) == bits(tree(xs))


@pytest.mark.parametrize(("world", "count"), [(1, 8), (2, 8), (3, 8), (4, 4), (5, 16)])
@pytest.mark.parametrize("divisor", [None, 3.0])
def test_reduce_scatter_tree_gives_each_rank_the_bits_of_its_shard(
    world: int, count: int, divisor: float | None
) -> None:
    rng = np.random.default_rng(world)
    leaves = [rng.standard_normal(world * 53).astype("f4") for _ in range(count)]
    expected = tree(leaves) if divisor is None else tree(leaves) / np.float32(divisor)

    def rank(group: Group) -> bytes:
        terms = terms_of(leaves, group.rank, world)
        kept = [term.copy() for term in terms]
        ask = None if divisor is None else (lambda: divisor)
        result = group._core.reduce_scatter_tree(terms, leaves=count, divisor=ask)
        assert [bits(term) for term in terms] == [bits(term) for term in kept]
        return bits(result)

    results = run_groups(groups_by(world, "reduce_scatter", "ring", 64), rank, timeout=20)
    assert results == [bits(expected[r * 53 : (r + 1) * 53].copy()) for r in range(world)]


@pytest.mark.parametrize("shares", [(1, 7), (5, 3), (1, 1, 6), (3, 4, 1)])
def test_reduce_scatter_tree_with_unequal_shares_gives_the_same_bits(shares: tuple[int, ...]) -> None:
    world, rng = len(shares), np.random.default_rng(3)
    leaves = [rng.standard_normal(world * 53).astype("f4") for _ in range(8)]
    nodes = tuple(maximal_subtrees(*range_of(rank, world, 8, shares), 8) for rank in range(world))

    def rank(group: Group) -> bytes:
        terms = [tree(leaves, *node).copy() for node in nodes[group.rank]]
        return bits(group._core.reduce_scatter_tree(terms, leaves=8, nodes=nodes))

    results = run_groups(groups_by(world, "reduce_scatter", "ring", 64), rank, timeout=20)
    assert results == [bits(tree(leaves)[r * 53 : (r + 1) * 53].copy()) for r in range(world)]


@pytest.mark.parametrize(("world", "count"), [(2, 8), (4, 8), (8, 8), (3, 8), (5, 16)])
def test_each_extra_subtree_adds_one_chunk_per_other_rank(world: int, count: int) -> None:
    """Nothing more where each rank's range is one subtree; else each subtree goes once to each owner of a chunk."""
    n = world * 200

    def rank(group: Group, *, in_microbatches: bool) -> int:
        before = group.bytes_sent
        if in_microbatches:
            terms = [np.ones(n, "f4") for _ in subtrees_by_rank(world, count)[group.rank]]
            group._core.all_reduce_tree(terms, leaves=count, out=terms[-1])
        else:
            group.all_reduce(np.ones(n, "f4"), order="rank")
        return group.bytes_sent - before

    def measured(*, in_microbatches: bool) -> list[int]:
        groups = groups_by(world, "all_reduce", "direct")
        return run_groups(groups, lambda group: rank(group, in_microbatches=in_microbatches))

    chunk = (world - 1) * 200 * 4
    plain, tree_of_parts = measured(in_microbatches=False), measured(in_microbatches=True)
    for rank_, nodes in enumerate(subtrees_by_rank(world, count)):
        assert tree_of_parts[rank_] - plain[rank_] == (len(nodes) - 1) * chunk


@pytest.mark.parametrize("schedule", ["star", "direct"])
@quick(max_examples=60)
@given(data=st.data(), world=st.integers(1, 5))
def test_nodes_of_a_repaired_step_give_the_same_bits(schedule: str, data: Any, world: int) -> None:
    """In a repaired step ranks have any nodes, some of them none; a rank without any sends values that do not count."""
    count = data.draw(st.integers(world, 16))
    n = data.draw(st.sampled_from([1, 53, 700]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    leaves = [random_values(rng, n, F4) for _ in range(count)]
    owner = data.draw(st.lists(st.integers(0, world - 1), min_size=count, max_size=count))
    nodes = tuple(joined([(v, v + 1) for v in range(count) if owner[v] == rank], count) for rank in range(world))

    def rank(group: Group) -> bytes:
        terms = [tree(leaves, *node).copy() for node in nodes[group.rank]] or [np.full(n, np.nan, F4)]
        return bits(group._core.all_reduce_tree(terms, leaves=count, out=np.empty(n, F4), nodes=nodes))

    groups = groups_by(world, "all_reduce", schedule, data.draw(st.sampled_from([64, 1 << 20])))
    results = run_groups(groups, rank, timeout=20)
    assert set(results) == {bits(tree(leaves))}


def test_different_plans_raise_collective_mismatch() -> None:
    plans = [(((0, 2),), ((2, 4),)), (((0, 1),), ((1, 2), (2, 4)))]

    def rank(group: Group) -> None:
        plan = plans[group.rank]
        terms = [np.ones(4, "f4") for _ in plan[group.rank]]
        group._core.all_reduce_tree(terms, leaves=4, out=terms[-1], nodes=plan)

    with pytest.raises(CollectiveMismatch, match="nodes="):
        run_groups(groups_by(2, "all_reduce", "direct"), rank, timeout=20)


def test_all_reduce_tree_refuses_invalid_arguments() -> None:
    (group,) = groups_by(1, "all_reduce", "direct")
    x = np.ones(4, "f4")
    with pytest.raises(UnsupportedOp, match="rank 0 of 1 has 1 subtrees of 8 leaves, but gave 2 arrays"):
        group._core.all_reduce_tree([x, x], leaves=8, out=x)
    with pytest.raises(UnsupportedOp, match="0 leaves for 1 ranks"):
        group._core.all_reduce_tree([x], leaves=0, out=x)
    with pytest.raises(UnsupportedOp, match="are not those of 8 leaves at 1 ranks"):
        group._core.all_reduce_tree([x], leaves=8, out=x, nodes=(((0, 4),),))
    with pytest.raises(UnsupportedOp, match="not int32"):
        group._core.all_reduce_tree([x.astype("i4")], leaves=8, out=x)
    with pytest.raises(SizeMismatch):
        group._core.all_reduce_tree([x], leaves=8, out=np.ones(5, "f4"))
