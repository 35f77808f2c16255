"""Who writes what: every element once, in equal shares, whoever holds it."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.checkpoint.part import Part, entry_of, index_of
from paceline.checkpoint.pieces import Shard, pieces_of

DTYPES = st.sampled_from([np.bool_, np.uint8, np.int16, ml_dtypes.bfloat16, np.float32, np.complex128])
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
wholes = st.lists(st.tuples(shapes, DTYPES), max_size=6)


def array(shape: tuple[int, ...], dtype: Any, seed: int) -> NDArray[Any]:
    return np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)


def shards(whole: NDArray[Any], world: int, replicas: int, cuts: list[int]) -> list[Shard]:
    """What each rank holds of an array that is cut over `world // replicas` ranks, and so again for each replica."""
    n = world // replicas
    bounds = [0, *sorted(cut % (whole.size + 1) for cut in cuts[: n - 1]), whole.size]
    flat = whole.reshape(-1)
    return [
        Shard(flat[bounds[r % n] : bounds[r % n + 1]], bounds[r % n], whole.shape, r // n, replicas)
        for r in range(world)
    ]


@given(
    wholes, st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (6, 3), (3, 3)]), st.lists(st.integers(0, 99), min_size=5)
)
def test_every_element_is_written_once(
    arrays: list[tuple[tuple[int, ...], Any]], worlds: tuple[int, int], cuts: list[int]
) -> None:
    world, replicas = worlds
    made = {f"a{n}": array(shape, dtype, n) for n, (shape, dtype) in enumerate(arrays)}
    spread = {path: shards(whole, world, replicas, cuts) for path, whole in made.items() if path in ("a0", "a2", "a3")}
    parts = []
    written: dict[str, NDArray[Any]] = {path: np.zeros(whole.size, np.int64) for path, whole in made.items()}
    for rank in range(world):
        held = {path: spread[path][rank] if path in spread else whole for path, whole in made.items()}
        pieces = pieces_of(held, rank, world)
        for piece in pieces:
            run = slice(piece.start, piece.start + piece.values.size)
            written[piece.path][run] += 1
            assert piece.values.tobytes() == made[piece.path].reshape(-1)[run].tobytes()
        widths = [piece.values.itemsize for piece in pieces]
        assert widths == sorted(widths, reverse=True)
        parts.append(Part(rank, world, 8, tuple(map(entry_of, pieces)), ""))
    assert all((times == 1).all() for times in written.values())
    index = index_of(parts)
    assert {path: (stored.shape, stored.dtype) for path, stored in index.items()} == {
        path: (whole.shape, whole.dtype) for path, whole in made.items()
    }


@given(st.lists(shapes, max_size=8), st.integers(1, 9))
def test_replicated_arrays_are_divided_evenly_into_few_pieces(dims: list[tuple[int, ...]], world: int) -> None:
    arrays = {f"a{n}": np.zeros(shape, np.float32) for n, shape in enumerate(dims)}
    each = [pieces_of(arrays, rank, world) for rank in range(world)]
    sizes = [sum(piece.values.nbytes for piece in pieces) for pieces in each]
    assert max(sizes) - min(sizes) <= 4
    assert sum(map(len, each)) <= len(arrays) + world - 1


def test_pieces_are_little_endian_and_in_c_order() -> None:
    x = np.arange(6, dtype=">i4").reshape(2, 3)
    (piece,) = pieces_of({"x": x.T}, 0, 1)
    assert piece.values.dtype == np.dtype("<i4")
    assert piece.values.tolist() == [0, 3, 1, 4, 2, 5]
    (piece,) = pieces_of({"x": np.float32(3)[None][0:1].reshape(())}, 0, 1)
    assert piece == ("x", (), 0, piece.values)
    assert piece.values.shape == (1,)


@pytest.mark.parametrize(("start", "holder", "holders"), [(-1, 0, 1), (3, 0, 1), (0, 1, 1), (0, -1, 1), (0, 0, 0)])
def test_a_shard_outside_its_array_or_holders_raises_value_error(start: int, holder: int, holders: int) -> None:
    with pytest.raises(ValueError, match=r"do not fit|is not one of"):
        Shard(np.zeros(2), start, (2, 2), holder, holders)


def entries(*pieces: tuple[str, str, tuple[int, ...], int, int]) -> list[list[Any]]:
    return [[path, dtype, list(shape), start, n] for path, dtype, shape, start, n in pieces]


def tree(pieces: list[list[Any]], part: tuple[int, int] = (0, 1), **changes: Any) -> dict[str, Any]:
    size = 8 + sum(piece[4] * np.dtype(piece[1]).itemsize for piece in pieces)
    return {"part": list(part), "header": 8, "bytes": size, "pieces": pieces, "crc32": "0" * 8} | changes


W = ("w", "float32", (2, 3), 0, 6)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        tree(entries(W), (1, 1)),
        tree(entries(W), (-1, 1)),
        tree(entries(W), (0, 1 << 20)),
        tree(entries(W), header=True),
        tree(entries(W), header=-8),
        tree(entries(W), header=1 << 60),
        tree(entries(W), bytes=31),
        tree(entries(W), bytes=32.0),
        tree(entries(W), crc32=""),
        tree(entries(W), crc32="0" * 16),
        tree(entries(W), crc32="0000000x"),
        tree(entries(W, W), bytes=56),
        tree(entries(("w", "float32", (2, 3), 1, 6))),
        tree(entries(("w", "float32", (1 << 20,) * 3, 0, 6))),
        tree(entries(("w", "float32", (0, 1 << 50), 0, 0)), bytes=8),
        tree(entries(("w", "float32", (1,) * 33, 0, 1))),
        tree(entries(W)) | {"pieces": [["w", "object", [2], 0, 2]]},
        tree([["w", "float32", [-2], 0, 0]]),
        tree([["w", "float32", [2], -1, 1]]),
        tree([["w", "float32", [2.0], 0, 1]]),
        tree([["w", "float32", [2], 0, True]]),
        {"part": [0, 1], "pieces": [[7, "float32", [2], 0, 2]], "header": 8, "bytes": 16, "crc32": "0" * 8},
        {"part": [0, 1], "pieces": [["w", "float32", [2], 0]], "header": 8, "bytes": 16, "crc32": "0" * 8},
        {"part": [0, 1], "pieces": [["w", "float32", "2", 0, 2]], "header": 8, "bytes": 16, "crc32": "0" * 8},
        {"part": [0, 1], "pieces": 3, "header": 8, "bytes": 16, "crc32": "0" * 8},
        {"part": [0], "pieces": [], "header": 8, "bytes": 8, "crc32": "0" * 8},
    ],
)
def test_an_invalid_part_entry_raises_value_error(bad: Any) -> None:
    with pytest.raises(ValueError):
        Part.from_tree(bad)


def test_part_survives_to_tree_and_from_tree() -> None:
    good = tree(entries(W, ("z", "complex128", (), 0, 1), ("none", "bfloat16", (0, 9), 0, 0)))
    part = Part.from_tree(good)
    assert part.to_tree() == good
    assert [place for _, place in part.places()] == [8, 32, 48]
    assert part.checksum(0) == 0


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([(0, 2), (3, 3)], "element 2 is in no part"),
        ([(0, 4), (3, 3)], "element 3 is in two parts"),
        ([(0, 3), (3, 2)], "element 5 is in no part"),
        ([(1, 2), (3, 3)], "element 0 is in no part"),
        ([(0, 6), (0, 6)], "element 0 is in two parts"),
    ],
)
def test_gaps_and_overlaps_between_parts_raise_value_error(runs: list[tuple[int, int]], words: str) -> None:
    parts = [
        Part.from_tree(tree(entries(("w", "float32", (2, 3), start, n)), (number, len(runs))))
        for number, (start, n) in enumerate(runs)
    ]
    with pytest.raises(ValueError, match=words):
        index_of(parts)


def test_parts_that_do_not_form_one_checkpoint_raise_value_error() -> None:
    half = [Part.from_tree(tree(entries(("w", "float32", (6,), 3 * n, 3)), (n, 2))) for n in range(2)]
    assert index_of(half)["w"].nbytes == 24
    for parts in ([], half[:1], half[::-1], [*half, half[0]]):
        with pytest.raises(ValueError, match="not all parts"):
            index_of(parts)
    other = Part.from_tree(tree(entries(("w", "float32", (2, 3), 3, 3)), (1, 2)))
    with pytest.raises(ValueError, match="disagree"):
        index_of([half[0], other])


def test_runs_of_a_sharded_array_are_contiguous_and_in_order() -> None:
    """`index_of` of a spread array: in order, whatever the order of the parts."""
    starts = [4, 0, 2]
    parts = [Part.from_tree(tree(entries(("w", "int8", (6,), s, 2)), (n, 3))) for n, s in enumerate(starts)]
    stored = index_of(parts)["w"]
    assert [run.part for run in stored.runs] == [1, 2, 0]
    assert all(a.start + a.elements == b.start for a, b in pairwise(stored.runs))
    assert prod(stored.shape) == 6
