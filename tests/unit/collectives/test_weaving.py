"""The plan of a woven all_reduce: every element once, in frames that links take, in pieces that fit a cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.rows import chunk_bounds
from paceline.collectives.weaving import weave
from paceline.links.base import PIECE_BYTES


@given(st.integers(2, 9), st.integers(0, 40_000_000), st.sampled_from([1, 2, 4, 8, 16]))
def test_each_element_is_in_one_segment_of_its_chunk(world: int, n: int, itemsize: int) -> None:
    woven = weave(world, n, (2 << 20) // itemsize, itemsize)
    assert woven.piece * itemsize == PIECE_BYTES
    for (lo, hi), segments in zip(chunk_bounds(n, world), woven.segments, strict=True):
        ends = [lo, *(end for _, end in segments)]
        assert [start for start, _ in segments] == ends[:-1]
        assert ends[-1] == hi
        assert all(0 < (end - start) * itemsize <= 2 << 20 for start, end in segments)
