"""Rows of the reference's rings, trees and collectives that no vector holds, on every link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline._collectives.rows import chunk_bounds
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.faulty import FaultyMesh
from paceline._links.frame import Frame
from paceline._links.local import local_meshes
from paceline.errors import OperationTimeout, SizeMismatch, UnsupportedOp
from paceline.testing import run_groups
from support.worlds import EACH_LINK, SOON, errors_over, run_over, scheduled

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).


@pytest.fixture(params=EACH_LINK)
def link(request: pytest.FixtureRequest) -> str:
    """A kind of link; each test that asks for it runs over every one."""
    return str(request.param)


def f4(*values: float) -> Any:
    return np.array(values, np.float32)


def every(collective: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("schedule", SCHEDULES[collective])


# Rings and trees.


@pytest.mark.parametrize(
    ("n", "parts", "sizes"),
    [
        (13, 4, [3, 3, 3, 4]),
        (10, 4, [2, 3, 2, 3]),
        (5, 3, [1, 2, 2]),
        (3, 4, [0, 1, 1, 1]),
        (1, 4, [0, 0, 0, 1]),
        (0, 3, [0, 0, 0]),
        (2**70 + 1, 2, [2**69, 2**69 + 1]),  # i * n does not overflow
    ],
)
def test_chunks(n: int, parts: int, sizes: list[int]) -> None:
    bounds = chunk_bounds(n, parts)
    assert [hi - lo for lo, hi in bounds] == sizes
    assert [bounds[0][0], *(hi for _, hi in bounds)] == [0, *(lo for lo, _ in bounds[1:]), n]


@every("all_reduce")
@pytest.mark.parametrize(
    ("given", "total"),
    [
        ([[1], [2], [4], [8]], [15]),
        ([[100 * r + i for i in range(13)] for r in range(4)], [600 + 4 * i for i in range(13)]),
        ([[1, 2, 3, 4], [10, 20, 30, 40]], [11, 22, 33, 44]),
        ([[]] * 3, []),
    ],
    ids=["fewer elements than ranks", "13 by 4", "two by two", "empty"],
)
def test_sums(given: list[list[float]], total: list[float], schedule: str, link: str) -> None:
    choose = scheduled("all_reduce")[schedule]
    results = run_over(link, len(given), lambda g: g.all_reduce(f4(*given[g.rank]), timeout=10.0), choose=choose)
    assert [result.tolist() for result in results] == [total] * len(given)


@every("all_reduce")
def test_a_mean_of_the_fixtures(schedule: str, link: str) -> None:
    given = [f4(1, 2, 3), f4(4, 5, 6)]
    choose = scheduled("all_reduce")[schedule]
    results = run_over(link, 2, lambda g: g.all_reduce(given[g.rank], op="mean"), choose=choose)
    assert [result.tolist() for result in results] == [[2.5, 3.5, 4.5]] * 2


CANCEL = [f4(*[1e8] * 3), f4(*[1] * 3), f4(*[-1e8] * 3)]


@pytest.mark.parametrize(("schedule", "total"), [("ring", [0, 0, 1]), ("star", [0, 0, 0])])
def test_the_order_of_a_sum_is_that_of_its_schedule(schedule: str, total: list[float], link: str) -> None:
    results = run_over(link, 3, lambda g: g.all_reduce(CANCEL[g.rank]), choose=scheduled("all_reduce")[schedule])
    assert [result.tolist() for result in results] == [total] * 3


@every("all_reduce")
def test_rank_order_is_one_order_by_every_schedule(schedule: str, link: str) -> None:
    choose = scheduled("all_reduce")[schedule]
    results = run_over(link, 3, lambda g: g.all_reduce(CANCEL[g.rank], order="rank"), choose=choose)
    assert [result.tolist() for result in results] == [[0, 0, 0]] * 3


@pytest.mark.parametrize(
    ("world", "root", "edges"),
    [
        (4, 1, {(1, 2), (1, 3), (2, 0)}),
        (6, 2, {(2, 3), (2, 4), (3, 5), (3, 0), (4, 1)}),
    ],
)
def test_a_broadcast_travels_down_the_tree(world: int, root: int, edges: set[tuple[int, int]]) -> None:
    sent: set[tuple[int, int]] = set()

    def watched(rank: int) -> Callable[[str, int, Frame], Frame]:
        def tamper(way: str, peer: int, frame: Frame) -> Frame:
            if way == "send":
                sent.add((rank, peer))
            return frame

        return tamper

    meshes = [FaultyMesh(mesh, watched(mesh.rank)) for mesh in local_meshes(world)]
    groups = [Group(mesh, SOON, choose=scheduled("broadcast")["tree"]) for mesh in meshes]
    results = run_groups(groups, lambda g: g.broadcast(f4(42, 43) if g.rank == root else f4(0, 0), root=root).tolist())
    assert results == [[42, 43]] * world
    assert sent == edges


@every("broadcast")
@pytest.mark.parametrize("root", range(4))
def test_a_broadcast_from_any_root(root: int, schedule: str, link: str) -> None:
    values = {0: [], 1: [10, 20, 30], 2: [100.5, 200.25, 300.125], 3: [7]}[root]  # an empty one is fine

    def rank(group: Group) -> Any:
        own = f4(*values) if group.rank == root else f4(*[0] * len(values))
        return group.broadcast(own, root=root).tolist()

    assert run_over(link, 4, rank, choose=scheduled("broadcast")[schedule]) == [values] * 4


# Collectives: shapes, results, a world of one.


@every("reduce_scatter")
@pytest.mark.parametrize(("shape", "part"), [((4, 3), (2, 3)), ((4, 0), (2, 0)), ((0,), (0,)), ((2,), (1,))])
def test_reduce_scatter_cuts_axis_0(shape: Any, part: Any, schedule: str, link: str) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    results = run_over(link, 2, lambda g: g.reduce_scatter(x), choose=scheduled("reduce_scatter")[schedule])
    for rank, result in enumerate(results):
        assert result.shape == part
        np.testing.assert_array_equal(result, 2 * x[rank * part[0] : (rank + 1) * part[0]])


@every("reduce_scatter")
def test_reduce_scatter_of_the_fixture(schedule: str, link: str) -> None:
    given = [f4(1, 2, 3, 4), f4(5, 6, 7, 8)]
    choose = scheduled("reduce_scatter")[schedule]
    results = run_over(link, 2, lambda g: g.reduce_scatter(given[g.rank]).tolist(), choose=choose)
    assert results == [[6, 8], [10, 12]]


@pytest.mark.parametrize(("world", "shape"), [(4, (2, 4)), (2, (3, 0)), (2, ()), (2, (3,)), (4, (2,))])
def test_reduce_scatter_of_what_has_no_equal_parts(world: int, shape: Any, link: str) -> None:
    """Even where the number of elements could be divided, or is 0."""

    def rank(group: Group) -> None:
        with pytest.raises(SizeMismatch, match=f"{world} equal parts"):
            group.reduce_scatter(np.zeros(shape, np.float32))
        group.barrier()

    run_over(link, world, rank)


@every("all_gather")
@pytest.mark.parametrize(("shape", "whole"), [((0, 3), (0, 3)), ((2, 0), (4, 0)), ((), (2,)), ((3, 1, 2), (6, 1, 2))])
def test_all_gather_joins_on_axis_0(shape: Any, whole: Any, schedule: str, link: str) -> None:
    parts = [np.full(shape, 5 + rank, np.float32) for rank in range(2)]
    results = run_over(link, 2, lambda g: g.all_gather(parts[g.rank]), choose=scheduled("all_gather")[schedule])
    for result in results:
        assert result.shape == whole
        np.testing.assert_array_equal(result, np.concatenate([np.atleast_1d(part) for part in parts]))


@every("all_gather")
def test_all_gather_of_uneven_parts_is_asked_for(schedule: str, link: str) -> None:
    """By itself it is a mismatch (`test_reference_defects`)."""
    choose = scheduled("all_gather")[schedule]
    results = run_over(link, 3, lambda g: g.all_gather(np.full(g.rank, g.rank), uneven=True).tolist(), choose=choose)
    assert results == [[1, 2, 2]] * 3


def test_a_world_of_one(link: str) -> None:
    """Every collective gives the argument's values and shape, in a new array."""

    def rank(group: Group) -> None:
        for x in (f4(1, 2, 3), np.float32(4).reshape(()), np.zeros((0, 3), np.float32), np.ones((2, 2), np.float32)):
            calls: dict[str, Callable[[], Any]] = {
                "sum": lambda x=x: group.all_reduce(x),
                "mean": lambda x=x: group.all_reduce(x, op="mean"),
                "rank order": lambda x=x: group.all_reduce(x, order="rank"),
                "reduce": lambda x=x: group.reduce(x),
                "reduce_scatter": lambda x=x: group.reduce_scatter(x, op="mean"),
                "broadcast": lambda x=x: group.broadcast(x, root=0),
                "scatter": lambda x=x: group.scatter([x]),
            }
            if x.ndim:
                calls["all_gather"] = lambda x=x: group.all_gather(x)
                calls["gather"] = lambda x=x: group.gather(x)
                calls["all_to_all"] = lambda x=x: group.all_to_all(x)
            for name, call in calls.items():
                result = call()
                assert result.shape == x.shape, name
                assert not np.shares_memory(result, x), name
                np.testing.assert_array_equal(result, x, name)
        assert group.all_gather(np.float32(5)).tolist() == [5]  # shape [W], as at every other W
        group.barrier()

    run_over(link, 1, rank)


@pytest.mark.parametrize(
    ("given", "results"),
    [
        ([[10, 20, 30, 40], [50, 60, 70, 80]], [[10, 20, 50, 60], [30, 40, 70, 80]]),
        ([[100 * r + i for i in range(4)] for r in range(4)], [[100 * i + r for i in range(4)] for r in range(4)]),
    ],
)
def test_all_to_all_of_equal_parts(given: list[list[float]], results: list[list[float]], link: str) -> None:
    assert run_over(link, len(given), lambda g: g.all_to_all(f4(*given[g.rank])).tolist()) == results


@pytest.mark.parametrize("known", [True, False], ids=["receivers know", "receivers ask"])
def test_all_to_all_of_uneven_parts(known: bool, link: str) -> None:
    given = [[10, 20, 21, 22], [30, 31, 40, 41]]
    sent, received = [[1, 3], [2, 2]], [[1, 2], [3, 2]]

    def rank(group: Group) -> Any:
        counts = received[group.rank] if known else None
        return group.all_to_all(f4(*given[group.rank]), send_counts=sent[group.rank], recv_counts=counts).tolist()

    assert run_over(link, 2, rank) == [[10, 30, 31], [20, 21, 22, 40, 41]]


def test_all_to_all_of_parts_that_cannot_be(link: str) -> None:
    x = f4(1, 2, 3)

    def rank(group: Group) -> Any:
        calls: list[tuple[str, Callable[[], object]]] = [
            ("2 equal parts", lambda: group.all_to_all(x)),
            ("0-d", lambda: group.all_to_all(np.float32(1))),
            ("send_counts", lambda: group.all_to_all(x, send_counts=[1, 1, 1])),
            ("send_counts", lambda: group.all_to_all(x, send_counts=[3])),
            ("send_counts", lambda: group.all_to_all(x, send_counts=[1, 1])),
            ("send_counts", lambda: group.all_to_all(x, send_counts=[4, -1])),
            ("recv_counts", lambda: group.all_to_all(x, send_counts=[1, 2], recv_counts=[1, 1, 1])),
        ]
        for what, call in calls:
            with pytest.raises(SizeMismatch, match=what):
                call()
        return float(group.all_reduce(f4(1))[0])

    assert run_over(link, 2, rank) == [2, 2]


def test_a_result_is_a_new_array_of_the_same_dtype_and_byte_order(link: str) -> None:
    def rank(group: Group) -> None:
        x = np.arange(4, dtype=">f4")
        for result in (group.all_reduce(x), group.broadcast(x), group.all_gather(x), group.reduce_scatter(x)):
            assert result.dtype == np.float32
            assert result.dtype.isnative
            assert result.flags.writeable
            assert not np.shares_memory(result, x)
        np.testing.assert_array_equal(group.all_reduce(x), 2 * np.arange(4))

    run_over(link, 2, rank)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_dtypes_of_the_reference(dtype: str, op: str, link: str) -> None:
    x = np.array([1, 2.5, -3.14, 0], dtype)
    total = x + x + x + x if op == "sum" else x
    for result in run_over(link, 4, lambda g: g.all_reduce(x, op=op)):
        assert result.dtype == x.dtype
        assert result.tobytes() == total.tobytes()


def test_what_has_no_such_op_is_unsupported(link: str) -> None:
    def rank(group: Group) -> None:
        with pytest.raises(UnsupportedOp, match="mean"):
            group.all_reduce(np.arange(3), op="mean")
        with pytest.raises(UnsupportedOp, match="unknown op"):
            group.reduce_scatter(f4(1, 2), op="average")
        with pytest.raises(UnsupportedOp, match="order"):
            group.all_reduce(f4(1), order="random")
        group.barrier()

    run_over(link, 2, rank)


def test_a_timeout_ends_the_generation_for_all(link: str) -> None:
    """By the reference only those who waited saw it."""

    def call(group: Group) -> None:
        if group.rank == 2:
            group.recv(0, tag=1, timeout=20.0)  # busy elsewhere; the others' failure wakes it
        group.all_reduce(f4(1), timeout=0.1)

    raised = errors_over(link, 3, call)
    assert [type(error) for error in raised] == [OperationTimeout] * 3
