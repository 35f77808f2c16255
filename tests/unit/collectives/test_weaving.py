"""The plan of a woven all_reduce: every element once, in frames that links take, in pieces that fit a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.arrays import as_bytes
from paceline.collectives.arithmetic import arithmetic
from paceline.collectives.engine import Call
from paceline.collectives.ops import reduction
from paceline.collectives.rows import chunk_bounds
from paceline.collectives.weaving import Weaver, weave
from paceline.links.base import PIECE_BYTES, LinkEnded
from paceline.links.frame import Frame, FrameKind


@given(st.integers(2, 9), st.integers(0, 40_000_000), st.sampled_from([1, 2, 4, 8, 16]))
def test_each_element_is_in_one_segment_of_its_chunk(world: int, n: int, itemsize: int) -> None:
    woven = weave(world, n, (2 << 20) // itemsize, itemsize)
    assert woven.piece * itemsize == PIECE_BYTES
    for (lo, hi), segments in zip(chunk_bounds(n, world), woven.segments, strict=True):
        ends = [lo, *(end for _, end in segments)]
        assert [start for start, _ in segments] == ends[:-1]
        assert ends[-1] == hi
        assert all(0 < (end - start) * itemsize <= 2 << 20 for start, end in segments)


class Others:
    """An engine of rank 0 of three, whose peers lend ones: what it is told. Rank 1 takes back at its n-th check."""

    def __init__(self, taken_back_at: int, *, can_promise: bool) -> None:
        self.mesh = SimpleNamespace(rank=0, size=3)
        self.totals = 0  # pieces, or whole segments, of this rank's total that a peer was told of
        self._checks_left = taken_back_at
        self._can_promise = can_promise

    def send(self, call: Call, peer: int, part: int, payload: memoryview, address: int = 0, *, lend: bool) -> None:
        self.totals += part % 2

    def promise(self, *_: Any) -> bool:
        return self._can_promise

    def fulfil(self, peer: int, part: int) -> None:
        self.totals += 1

    def receive(self, call: Call, peer: int, part: int, nbytes: int) -> Frame:
        return Frame(FrameKind.DATA, 1, 1, part, b"", as_bytes(np.ones(nbytes // 4, np.float32)))

    def verify(self, peer: int, part: int) -> None:
        if peer == 1:
            self._checks_left -= 1
            if not self._checks_left:
                raise LinkEnded("rank 1 took back what it had lent")

    def release(self) -> None:
        """Nothing is held."""

    def finish(self, call: Call) -> None:
        """Nothing is lent."""


@pytest.mark.parametrize("can_promise", [True, False])
@pytest.mark.parametrize("taken_back_at", [1, 2])
def test_nobody_is_told_of_a_total_whose_terms_were_taken_back(taken_back_at: int, can_promise: bool) -> None:
    """A rank's interrupted call gives it its array again: what another has just read of it may be anything."""
    n = 3 * 2 * PIECE_BYTES // 4  # two pieces for each rank
    x = np.ones(n, np.float32)
    engine: Any = Others(taken_back_at, can_promise=can_promise)
    how = arithmetic(reduction("sum", x.dtype), 3)
    with pytest.raises(LinkEnded):
        Weaver(engine, Call(1, b"", 0.0, 1.0), weave(3, n, n, 4), x, x, how).run()
    assert engine.totals == (2 * (taken_back_at - 1) if can_promise else 0)
