"""Divisors, infinities, places for results, and trees; values are in `unit/collectives/test_values`."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paceline._group import Group
from paceline.errors import CollectiveMismatch, UnsupportedOp
from paceline.testing import run_groups, run_ranks
from support.collective_calls import groups_by


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", ml_dtypes.bfloat16])
def test_a_divisor_may_come_from_an_earlier_operation(world: int, dtype: Any) -> None:
    def rank(g: Group) -> Any:
        weight = np.full(1, 0.5, np.float64)
        x = (np.arange(72) % 7 * (g.rank + 1)).astype(dtype)
        total = g.all_reduce(weight, out=weight, async_op=True)
        work = g.all_reduce(x, divisor=weight.item, async_op=True)
        part = g.reduce_scatter(x, divisor=weight.item, async_op=True)
        assert total.wait() is weight
        return work.wait(), part.wait()

    for r, (found, part) in enumerate(run_ranks(world, rank)):
        expected = (np.arange(72) % 7 * sum(range(1, world + 1))).astype(dtype) / np.asarray(0.5 * world).astype(dtype)
        assert found.dtype == part.dtype == dtype
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(part, np.split(expected, world)[r])


def test_a_divisor_is_refused_unless_the_op_is_a_sum_of_floats() -> None:
    def rank(g: Group) -> None:
        for x, op in ((np.ones(3, int), "sum"), (np.ones(3), "mean"), (np.ones(3), "max")):
            for call in (g.all_reduce, g.reduce_scatter):
                with pytest.raises(UnsupportedOp, match="a divisor is for sums of floats"):
                    call(x, op=op, divisor=lambda: 2.0)

    run_ranks(1, rank)


@pytest.mark.parametrize("call", [Group.all_reduce, Group.reduce_scatter])
def test_a_divisor_on_one_rank_alone_is_a_mismatch(call: Callable[..., Any]) -> None:
    def rank(g: Group) -> None:
        with pytest.raises(CollectiveMismatch, match="divided"):
            call(g, np.ones(4), divisor=(lambda: 2.0) if g.rank else None)
        assert g._core.recorder.snapshot()[0]["operation"] == call.__name__, "the record can be read"

    run_ranks(2, rank)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_overflow_gives_infinity_without_changing_numpy_error_settings(
    dtype: type[np.generic], op: str, world: int
) -> None:
    """Of ours; what NumPy warns of in the user's own sums stays as it was."""

    def rank(g: Group) -> Any:
        before = np.geterr()
        result = g.all_reduce(np.array([65504.0 if dtype is np.float16 else 3e38, np.nan], dtype), op=op)
        assert np.geterr() == before
        return result

    for huge, nan in run_ranks(world, rank):
        assert np.isfinite(huge) == (op == "mean" or world == 1)
        assert np.isnan(nan)


def test_broadcast_accepts_out_without_an_argument() -> None:
    def rank(group: Group) -> Any:
        out = np.zeros(4)
        group.broadcast(np.arange(4.0) if group.rank == 1 else None, root=1, out=out)
        return out.tolist()

    assert run_ranks(3, rank) == [[0, 1, 2, 3]] * 3


def test_out_may_overlap_the_argument() -> None:
    def rank(group: Group) -> Any:
        buffer = np.arange(40.0)
        group.all_reduce(buffer[:32], out=buffer[8:])
        return buffer[8:].tolist()

    assert run_groups(groups_by(3, "all_reduce", "ring", 16), rank) == [[3.0 * i for i in range(32)]] * 3


def test_out_may_be_non_contiguous() -> None:
    def rank(group: Group) -> Any:
        out = np.zeros((3, 4)).T
        result = group.all_reduce(np.ones((4, 3)), out=out)
        assert result is out
        return out.tolist()

    assert run_ranks(2, rank) == [[[2.0] * 3] * 4] * 2


def test_average_of_a_tree_keeps_its_structure() -> None:
    def rank(group: Group) -> Any:
        tree: dict[str, Any] = {"w": np.full((2, 2), group.rank, "f4"), "b": [np.float64(group.rank), (np.zeros(0),)]}
        if group.rank == 1:
            tree = dict(reversed(tree.items()))
        return tree, group.average(tree)

    for given_tree, mean in run_ranks(3, rank):
        assert list(mean) == list(given_tree)
        assert mean["w"].tolist() == [[1, 1], [1, 1]]
        assert mean["w"].dtype == np.float32
        assert mean["b"][0] == 1
        assert isinstance(mean["b"][1], tuple)
        assert mean["b"][1][0].shape == (0,)
        assert given_tree["w"][0, 0] in (0, 1, 2)
