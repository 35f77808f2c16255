"""What collectives compute: against NumPy, over dtypes, ops, worlds, lengths, layouts; the same bits on all ranks."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._collectives.choose import choose, only
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline.config import Config
from paceline.errors import CollectiveMismatch, InvalidRank, InvalidWorldSize, SizeMismatch, UnsupportedOp
from paceline.testing import local_groups, run_groups, run_ranks

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("?", "i1", "i4", "u8", "f2", "f4", "f8", "c8", "c16")] + [BF16]
NUMPY = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@contextmanager
def segments_of(nbytes: Any) -> Any:
    """Small segments, so that small arrays are cut as large ones are."""
    with mock.patch("paceline._collectives.tasks.SEGMENT_BYTES", nbytes):
        yield


def groups_with(world: int, schedule: str) -> Any:
    pick = partial(choose, rules=only("all_reduce", schedule))
    return [Group(mesh, Config(), choose=pick) for mesh in local_meshes(world)]


def ops_of(dtype: Any) -> Any:
    ops = ["sum", "prod"]
    ops += ["min", "max"] if dtype.kind != "c" else []
    ops += ["band", "bor", "bxor"] if dtype.kind in "biu" else ["mean"]
    return ops


def layout(x: Any, name: Any) -> Any:
    if name == "strided":
        return np.repeat(x, 2)[::2]
    if name == "swapped":
        return x.astype(x.dtype.newbyteorder(">")) if x.dtype != BF16 else x
    if name == "square" and x.size % 2 == 0:
        return np.asfortranarray(x.reshape(2, -1))
    return x


@settings(max_examples=150, deadline=None)
@given(data=st.data(), world=st.integers(1, 5))
def test_all_reduce_equals_numpy(data: Any, world: int) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    op = data.draw(st.sampled_from(ops_of(dtype)))
    n = data.draw(st.sampled_from([0, 1, max(0, world - 1), world, 7, 31, 97]))
    kind = data.draw(st.sampled_from(["plain", "strided", "swapped", "square"]))
    schedule = data.draw(st.sampled_from(list(SCHEDULES["all_reduce"])))
    use_out = data.draw(st.sampled_from(["none", "out", "in place"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    # whole numbers from 0 to 3: exact in every dtype, in every order
    inputs = [layout(rng.integers(0, 4, n).astype(dtype), kind) for _ in range(world)]
    kept = [x.copy() for x in inputs]

    def rank(group: Group) -> Any:
        x = inputs[group.rank]
        out = {"none": None, "out": np.empty_like(x), "in place": x}[use_out]
        result = group.all_reduce(x, op=op, out=out)
        assert out is None or result is out
        return result

    with segments_of(data.draw(st.sampled_from([16, 64, 1 << 20]))):
        results = run_groups(groups_with(world, schedule), rank)
    expected = kept[0].astype(dtype)
    for x in kept[1:]:
        expected = NUMPY["sum" if op == "mean" else op](expected, x.astype(dtype))
    if op == "mean":  # NumPy divides complex numbers with one rounding more
        real = expected.view(expected.real.dtype) if dtype.kind == "c" and expected.ndim else expected
        expected = (real / real.dtype.type(world)).view(dtype)
    for result, x, before in zip(results, inputs, kept, strict=True):
        assert result.shape == x.shape
        assert use_out != "none" or result.dtype == dtype
        assert result.astype(dtype).tobytes() == expected.astype(dtype).tobytes()
        assert use_out == "in place" or (x == before).all(), "the argument is never changed"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), world=st.integers(1, 5), dtype=st.sampled_from([np.dtype("f2"), np.dtype("f4"), BF16]))
def test_all_ranks_hold_the_same_bits(data: Any, world: int, dtype: Any) -> None:
    schedule = data.draw(st.sampled_from(list(SCHEDULES["all_reduce"])))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    inputs = [(rng.standard_normal(101) * 10.0 ** rng.integers(-4, 4, 101)).astype(dtype) for _ in range(world)]
    with segments_of(64):
        results = run_groups(groups_with(world, schedule), lambda g: g.all_reduce(inputs[g.rank], op="mean"))
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize(("schedule", "total"), [("ring", [0, 0, 1]), ("star", [0, 0, 0])])
def test_the_order_of_sums_is_that_of_the_reference(schedule: str, total: Any) -> None:
    values = [[1e8] * 3, [1] * 3, [-1e8] * 3]
    results = run_groups(groups_with(3, schedule), lambda g: g.all_reduce(np.array(values[g.rank], np.float32)))
    assert [result.tolist() for result in results] == [total] * 3


@pytest.mark.parametrize(
    ("inputs", "total"),
    [
        ([[1, 2, 3], [4, 5, 6]], [5, 7, 9]),
        ([[1] * 7, [2] * 7, [4] * 7, [8] * 7], [15] * 7),
        (
            [[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60], [100, 200, 300, 400, 500, 600]],
            [111, 222, 333, 444, 555, 666],
        ),
        ([[1], [2], [4], [8]], [15]),
        ([[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]], [6, 6, 6]),
    ],
)
@pytest.mark.parametrize("schedule", ["ring", "star"])
def test_vectors_of_the_reference(schedule: str, inputs: Any, total: Any) -> None:
    groups = groups_with(len(inputs), schedule)
    for result in run_groups(groups, lambda g: g.all_reduce(np.array(inputs[g.rank], np.float32))):
        assert result.tolist() == total


def test_the_mean_of_the_reference() -> None:
    assert [r.tolist() for r in run_ranks(4, lambda g: g.all_reduce(np.full(3, g.rank, "f4"), op="mean"))] == [
        [1.5] * 3
    ] * 4


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", ml_dtypes.bfloat16])
def test_a_divisor_that_an_earlier_operation_tells(world: int, dtype: Any) -> None:
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


def test_a_divisor_is_for_sums_that_can_be_divided() -> None:
    def rank(g: Group) -> None:
        for x, op in ((np.ones(3, int), "sum"), (np.ones(3), "mean"), (np.ones(3), "max")):
            for call in (g.all_reduce, g.reduce_scatter):
                with pytest.raises(UnsupportedOp, match="a divisor is for sums of floats"):
                    call(x, op=op, divisor=lambda: 2.0)

    run_ranks(1, rank)


@pytest.mark.parametrize("call", [Group.all_reduce, Group.reduce_scatter])
def test_who_divides_and_who_does_not_are_told(call: Callable[..., Any]) -> None:
    def rank(g: Group) -> None:
        with pytest.raises(CollectiveMismatch, match="divided"):
            call(g, np.ones(4), divisor=(lambda: 2.0) if g.rank else None)
        assert g.recorder.snapshot()[0]["operation"] == call.__name__, "the record can be read"

    run_ranks(2, rank)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_infinities_are_values_and_not_warnings(dtype: type[np.generic], op: str, world: int) -> None:
    """Of ours; what NumPy warns of in the user's own sums stays as it was."""

    def rank(g: Group) -> Any:
        before = np.geterr()
        result = g.all_reduce(np.array([65504.0 if dtype is np.float16 else 3e38, np.nan], dtype), op=op)
        assert np.geterr() == before
        return result

    for huge, nan in run_ranks(world, rank):
        assert np.isfinite(huge) == (op == "mean" or world == 1)
        assert np.isnan(nan)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), world=st.integers(1, 6))
def test_broadcast(data: Any, world: int) -> None:
    root = data.draw(st.integers(0, world - 1))
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.sampled_from([(), (0,), (1,), (5, 3), (0, 4), (41,)]))
    kind = data.draw(st.sampled_from(["none", "like", "out", "in place"]))
    value = np.random.default_rng(0).integers(0, 4, shape).astype(dtype)

    def rank(group: Group) -> Any:
        own = value.copy() if group.rank == root else np.zeros_like(value)
        out = {"out": np.zeros_like(value), "in place": own}.get(kind)
        x = None if kind == "none" and group.rank != root else own
        result = group.broadcast(x, root=root, out=out)
        assert result is out or not np.shares_memory(result, own), "a result is no alias of the argument"
        return result

    with segments_of(16):
        results = run_ranks(world, rank)
    for result in results:
        assert result.dtype == dtype
        assert result.shape == shape
        assert result.tobytes() == value.tobytes()


def test_broadcast_into_out_alone() -> None:
    def rank(group: Group) -> Any:
        out = np.zeros(4)
        group.broadcast(np.arange(4.0) if group.rank == 1 else None, root=1, out=out)
        return out.tolist()

    assert run_ranks(3, rank) == [[0, 1, 2, 3]] * 3


def test_overlapping_out_is_no_trap() -> None:
    def rank(group: Group) -> Any:
        buffer = np.arange(40.0)
        group.all_reduce(buffer[:32], out=buffer[8:])
        return buffer[8:].tolist()

    with segments_of(16):
        assert run_groups(groups_with(3, "ring"), rank) == [[3.0 * i for i in range(32)]] * 3


def test_non_contiguous_out() -> None:
    def rank(group: Group) -> Any:
        out = np.zeros((3, 4)).T
        result = group.all_reduce(np.ones((4, 3)), out=out)
        assert result is out
        return out.tolist()

    assert run_ranks(2, rank) == [[[2.0] * 3] * 4] * 2


def test_barrier_serialises_all_ranks() -> None:
    entered = []

    def rank(group: Group) -> Any:
        entered.append(group.rank)
        group.barrier()
        return len(entered)

    assert run_ranks(4, rank) == [4] * 4


def test_average_of_a_tree() -> None:
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


@pytest.mark.parametrize("world", [1, 2])
def test_user_mistakes_are_errors_at_the_call_and_cost_nothing(world: int) -> None:
    def rank(group: Group) -> Any:
        x = np.ones(3, np.float32)
        with pytest.raises(InvalidRank, match=rf"root 5 .* world of {world}"):
            group.broadcast(x, root=5)
        with pytest.raises(InvalidRank, match="-1"):
            group.broadcast(x, root=-1)
        with pytest.raises(InvalidRank, match="dst 2"):
            group.send(x, 2)
        with pytest.raises(InvalidRank, match="src 9"):
            group.recv(9)
        with pytest.raises(UnsupportedOp, match="cannot be sent"):
            group.all_reduce(np.array([object()]))
        with pytest.raises(UnsupportedOp, match="unknown op"):
            group.all_reduce(x, op="average")
        with pytest.raises(UnsupportedOp, match="whole numbers"):
            group.average({"n": np.ones(2, int)})
        with pytest.raises(SizeMismatch):
            group.all_reduce(x, out=np.ones(4, np.float32))
        with pytest.raises(UnsupportedOp, match="float64"):
            group.all_reduce(x, out=np.ones(3))
        with pytest.raises(UnsupportedOp, match="None"):
            group.broadcast(None, root=group.rank)
        with pytest.raises(UnsupportedOp, match="tag"):
            group.send(x, 0, tag=-1)
        return group.all_reduce(x).tolist()

    assert run_ranks(world, rank) == [[world] * 3] * world


def test_a_world_needs_a_rank() -> None:
    with pytest.raises(InvalidWorldSize, match="not 0"):
        local_groups(0)
