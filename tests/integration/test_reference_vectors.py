"""The reference system's own unit tests of backends, rings and collectives, as vectors, under their names.

Each holds over every kind of link, and where schedules do the work by every schedule. Lists are indexed by rank; arrays
are float32, and equal bit for bit where the vector has no tolerance. The rows around them: `test_reference_rows`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from paceline._base.arrays import Array, as_bytes, from_bytes
from paceline._collectives.choose import choose as choose_by_rules
from paceline._collectives.rows import chunk_bounds, ring_neighbours
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.frame import Frame, FrameKind, decode, encode
from paceline.errors import InvalidRank, InvalidWorldSize, SizeMismatch
from support.worlds import EACH_LINK, run_over, scheduled, world_over

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).


class Vector(NamedTuple):
    """A collective on given arrays.

    Attributes:
        name: of the vector.
        collective: a key of `SCHEDULES`.
        call: from a group and the rank's array to the result.
        given: the arrays.
        expected: the results.
        tolerance: how far they may be off.
    """

    name: str
    collective: str
    call: Callable[[Group, Array], Array]
    given: list[Any]
    expected: list[Any]
    tolerance: float = 0.0


def all_reduce(op: str) -> Callable[[Group, Array], Array]:
    return lambda group, x: group.all_reduce(x, op=op)


def reduce_scatter(op: str) -> Callable[[Group, Array], Array]:
    return lambda group, x: group.reduce_scatter(x, op=op)


def broadcast(root: int) -> Callable[[Group, Array], Array]:
    return lambda group, x: group.broadcast(x, root=root)


def all_gather(group: Group, x: Array) -> Array:
    return group.all_gather(x)


def numbered(shape: tuple[int, ...], rank: int) -> npt.NDArray[np.float32]:
    """An array of this shape, with other values at each rank, for vectors that give a shape alone."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + np.float32(100 * rank)


TO_3 = [[r, r, r] for r in range(4)]

COLLECTIVES = [
    Vector("ring::allreduce_two_ranks_sum", "all_reduce", all_reduce("sum"), [[1, 2, 3], [4, 5, 6]], [[5, 7, 9]] * 2),
    Vector(
        "ring::allreduce_four_ranks_sum_with_uneven_chunks",
        "all_reduce",
        all_reduce("sum"),
        [[1] * 7, [2] * 7, [4] * 7, [8] * 7],
        [[15] * 7] * 4,
    ),
    Vector(
        "ring::allreduce_three_ranks_sum",
        "all_reduce",
        all_reduce("sum"),
        [[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60], [100, 200, 300, 400, 500, 600]],
        [[111, 222, 333, 444, 555, 666]] * 3,
    ),
    Vector(
        "ring::tree_broadcast_distributes_from_root",
        "broadcast",
        broadcast(1),
        [[0, 0, 0], [42, 43, 44], [0, 0, 0], [0, 0, 0]],
        [[42, 43, 44]] * 4,
    ),
    Vector("collective::allreduce_sum_4_ranks", "all_reduce", all_reduce("sum"), TO_3, [[6, 6, 6]] * 4, 1e-6),
    Vector("collective::allreduce_mean_4_ranks", "all_reduce", all_reduce("mean"), TO_3, [[1.5, 1.5, 1.5]] * 4, 1e-6),
    Vector("collective::broadcast_from_rank_0", "broadcast", broadcast(0), [[42, 42]] + [[0, 0]] * 3, [[42, 42]] * 4),
    Vector("collective::allreduce_single_rank", "all_reduce", all_reduce("sum"), [[1, 2, 3]], [[1, 2, 3]]),
    Vector(
        "collective::all_gather_4_ranks",
        "all_gather",
        all_gather,
        [[0, 1], [10, 11], [20, 21], [30, 31]],
        [[0, 1, 10, 11, 20, 21, 30, 31]] * 4,
    ),
    Vector(
        "collective::all_gather_preserves_shape",
        "all_gather",
        all_gather,
        [numbered((2, 3), r) for r in range(2)],
        [np.concatenate([numbered((2, 3), r) for r in range(2)])] * 2,  # [4, 3]
    ),
    Vector("collective::all_gather_single_rank", "all_gather", all_gather, [[1, 2, 3]], [[1, 2, 3]]),
    Vector(
        "collective::all_gather_zero_size", "all_gather", all_gather, [np.empty((0, 3))] * 2, [np.empty((0, 3))] * 2
    ),
    Vector(
        "collective::reduce_scatter_sum_4_ranks",
        "reduce_scatter",
        reduce_scatter("sum"),
        [[1, 2, 3, 4]] * 4,
        [[4], [8], [12], [16]],
    ),
    Vector(
        "collective::reduce_scatter_mean_2_ranks",
        "reduce_scatter",
        reduce_scatter("mean"),
        [[0, 0, 0, 0], [1, 1, 1, 1]],
        [[0.5, 0.5], [0.5, 0.5]],
    ),
    Vector("collective::reduce_scatter_single_rank", "reduce_scatter", reduce_scatter("sum"), [[1, 2, 3]], [[1, 2, 3]]),
    Vector(
        "collective::reduce_scatter_preserves_shape",
        "reduce_scatter",
        reduce_scatter("sum"),
        [numbered((4, 3), r) for r in range(2)],
        list(np.split(numbered((4, 3), 0) + numbered((4, 3), 1), 2)),  # [2, 3] each
    ),
]
"""A result's shape is that of `expected`."""


@pytest.mark.parametrize("link", EACH_LINK)
@pytest.mark.parametrize(
    ("vector", "schedule"),
    [
        pytest.param(vector, schedule, id=f"{vector.name}-{schedule or 'by_rules'}")
        for vector in COLLECTIVES
        for schedule in (None, *SCHEDULES[vector.collective])
    ],
)
def test_collective(vector: Vector, schedule: str | None, link: str) -> None:
    given = [np.array(x, np.float32) for x in vector.given]
    kept = [x.copy() for x in given]
    choose = scheduled(vector.collective)[schedule] if schedule else choose_by_rules
    results = run_over(link, len(given), lambda group: vector.call(group, given[group.rank]), choose=choose)
    for result, values in zip(results, vector.expected, strict=True):
        expected = np.array(values, np.float32)
        assert result.dtype == np.float32
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=0, atol=vector.tolerance)
    for x, before in zip(given, kept, strict=True):
        np.testing.assert_array_equal(x, before, "the argument is never changed")


VECTORS: dict[str, Callable[[str], None]] = {}
"""Name to test, given the kind of link; `test_vector` runs them."""


def vector(name: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Registers a test of a vector that is more than a collective on arrays."""

    def register(test: Callable[[str], None]) -> Callable[[str], None]:
        VECTORS[name] = test
        return test

    return register


@vector("backend::simulated_send_recv")
def send_recv(link: str) -> None:
    def rank(group: Group) -> Any:
        if group.rank == 0:
            group.send(np.array([1, 2, 3, 4], np.uint8), 1)
            return None
        received, source = group.recv(0)
        return received.dtype, received.tolist(), source

    assert run_over(link, 2, rank)[1] == (np.uint8, [1, 2, 3, 4], 0)


@vector("backend::simulated_rank_world_size")
def rank_world_size(link: str) -> None:
    with world_over(link, 3) as groups:
        assert [group.rank for group in groups] == [0, 1, 2]
        assert [group.size for group in groups] == [3, 3, 3]


@vector("backend::invalid_world_size")
def invalid_world_size(link: str) -> None:
    if link == "local":
        with pytest.raises(InvalidWorldSize), world_over(link, 0):
            pass
        return
    import paceline  # gRPC links are made by `join` alone

    with pytest.raises(InvalidWorldSize):
        paceline.join("127.0.0.1:1", rank=0, world_size=0)


@vector("backend::send_to_invalid_rank")
def send_to_invalid_rank(link: str) -> None:
    with world_over(link, 2) as groups, pytest.raises(InvalidRank, match="5"):
        groups[0].send(np.zeros(1, np.uint8), 5)


@vector("backend::subbackend_local_rank_and_world_size")
def subgroup_rank_and_size(link: str) -> None:
    with world_over(link, 4) as groups:
        parts = {rank: groups[rank].subgroup([1, 3]) for rank in (1, 3)}
        assert {rank: (part.rank, part.size) for rank, part in parts.items()} == {1: (0, 2), 3: (1, 2)}


@vector("backend::subbackend_global_rank_not_in_members_is_error")
def subgroup_of_others(link: str) -> None:
    with world_over(link, 4) as groups, pytest.raises(InvalidRank, match=r"rank 0 .*\[1, 3\]"):
        groups[0].subgroup([1, 3])


@vector("backend::subbackend_empty_members_is_error")
def subgroup_of_nobody(link: str) -> None:
    with world_over(link, 2) as groups, pytest.raises(InvalidWorldSize):
        groups[0].subgroup([])


@vector("backend::subbackend_send_recv_routes_through_parent")
def subgroup_send_recv(link: str) -> None:
    def rank(group: Group) -> Any:
        if group.rank not in (0, 2):
            return None
        part = group.subgroup([0, 2])
        if part.rank == 0:
            part.send(np.array([9, 8, 7], np.uint8), 1)
            return None
        received, source = part.recv(0)
        return received.tolist(), source

    assert run_over(link, 4, rank) == [None, None, ([9, 8, 7], 0), None]


@vector("backend::subbackend_barrier")
def subgroup_barrier(link: str) -> None:
    entered: list[int] = []

    def rank(group: Group) -> Any:
        if group.rank % 2:
            return None
        part = group.subgroup([0, 2, 4])
        entered.append(group.rank)
        part.barrier()
        return len(entered)

    assert run_over(link, 6, rank) == [3, None, 3, None, 3, None]


@vector("backend::subbackend_to_global_to_local")
def subgroup_ranks(link: str) -> None:
    with world_over(link, 4) as groups:
        part = groups[0].subgroup([0, 2])
        assert [part.global_rank(rank) for rank in (0, 1)] == [0, 2]
        assert {rank: part.group_rank(rank) for rank in (0, 2, 1, 3)} == {0: 0, 2: 1, 1: None, 3: None}


@vector("backend::subbackend_sorts_and_dedups_members")
def subgroup_sorts_and_dedups(link: str) -> None:
    with world_over(link, 4) as groups:
        part = groups[2].subgroup([3, 2, 0, 2, 3])
        assert (list(part.ranks), part.rank, part.size) == ([0, 2, 3], 1, 3)


@vector("collective::broadcast_invalid_root")
def broadcast_invalid_root(link: str) -> None:
    def rank(group: Group) -> None:
        with pytest.raises(InvalidRank, match="5"):
            group.broadcast(np.zeros(3, np.float32), root=5)
        group.barrier()  # the mistake has cost nothing

    run_over(link, 2, rank)


@vector("collective::reduce_scatter_indivisible")
def reduce_scatter_indivisible(link: str) -> None:
    def rank(group: Group) -> None:
        with pytest.raises(SizeMismatch, match=r"2 equal parts.*\(3,\)"):
            group.reduce_scatter(np.array([1, 2, 3], np.float32))
        group.barrier()

    run_over(link, 2, rank)


def bytes_roundtrip(link: str, dtype: str) -> None:
    """What travels: through the frame codec, and through links, between ranks and to oneself."""
    x = np.array([1, 2.5, -3.14, 0], dtype)
    frame = decode(encode(Frame(FrameKind.DATA, 1, 1, 0, b"", as_bytes(x))))
    assert from_bytes(frame.payload, x.dtype).tobytes() == x.tobytes()

    def rank(group: Group) -> bytes:
        group.send(x, 1 - group.rank)
        group.send(x, group.rank, tag=1)
        (other, _), (own, _) = group.recv(1 - group.rank), group.recv(group.rank, tag=1)
        assert other.dtype == own.dtype == x.dtype
        return other.tobytes() + own.tobytes()

    assert run_over(link, 2, rank) == [2 * x.tobytes()] * 2


@vector("collective::bytes_roundtrip_f32")
def bytes_roundtrip_f32(link: str) -> None:
    bytes_roundtrip(link, "f4")


@vector("collective::bytes_roundtrip_f64")
def bytes_roundtrip_f64(link: str) -> None:
    bytes_roundtrip(link, "f8")


@pytest.mark.parametrize("link", EACH_LINK)
@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str, link: str) -> None:
    VECTORS[name](link)


BARRIERS = ["backend::simulated_barrier", "collective::barrier_completes", "ring::barrier_serialises_all_ranks"]


@pytest.mark.parametrize("link", EACH_LINK)
@pytest.mark.parametrize("schedule", SCHEDULES["barrier"])
@pytest.mark.parametrize("name", BARRIERS)
def test_barrier(name: str, schedule: str, link: str) -> None:
    lock = threading.Lock()
    entered = 0

    def rank(group: Group) -> int:
        nonlocal entered
        with lock:
            entered += 1
        group.barrier()
        return entered

    assert run_over(link, 4, rank, choose=scheduled("barrier")[schedule]) == [4] * 4


ARITHMETIC = {
    "ring::chunk_ranges_balanced": (lambda: chunk_bounds(8, 4), [(0, 2), (2, 4), (4, 6), (6, 8)]),
    "ring::chunk_ranges_unbalanced_cover_all_elements_exactly_once": (
        lambda: chunk_bounds(7, 4),
        [(0, 1), (1, 3), (3, 5), (5, 7)],
    ),
    "ring::ring_neighbours_wrap_around": (
        lambda: [ring_neighbours(rank, 4) for rank in (0, 3, 2)],
        [(3, 1), (2, 0), (1, 3)],
    ),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str) -> None:
    compute, expected = ARITHMETIC[name]
    assert compute() == expected


def test_all_vectors_are_here() -> None:
    names = [*(vector.name for vector in COLLECTIVES), *VECTORS, *BARRIERS, *ARITHMETIC]
    assert len(names) == len(set(names))
    counts = {part: sum(name.startswith(f"{part}::") for name in names) for part in ("backend", "ring", "collective")}
    assert counts == {"backend": 12, "ring": 8, "collective": 17}
