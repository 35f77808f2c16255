"""all_reduce with compression: ranks exchange encoded chunks, then gather encoded totals.

Rank c owns chunk c. Each rank encodes its values of chunk c and sends them to rank c. The owner adds up the decoded
values and its own, in rank order, and encodes the total once. All ranks, including the owner, decode these bytes, so
all have the same bits (I5). A few elements at the end may travel uncompressed: every rank sends them to every other,
and adds them up in rank order.

Letters: N encoded elements, E exact elements after them, W world size, c chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from paceline._base.arrays import Array, as_flat, check_out, deliver, landing, native
from paceline._collectives.arithmetic import name_of_op
from paceline._collectives.engine import CollectiveCall, Engine
from paceline._collectives.program import all_gather_program, all_to_all_program
from paceline._collectives.rows import chunk_bounds
from paceline._collectives.tasks import Chooser, Task, segment
from paceline.compression import PIECE, Codec, Memory, words_of
from paceline.errors import SizeMismatch, UnsupportedOp

Empty = Callable[[int, Any], Array]
"""Makes an array of a size and dtype that links can use without a copy."""

_LARGEST = np.finfo(np.float32).max


def all_reduce_compressed_task(
    engine: Engine,
    x: Array,
    codec: Codec,
    op: str,
    exact: int,
    out: Array | None,
    choose: Chooser,
    memory: Memory,
    empty: Empty,
    detail: str = "",
) -> Task[Array]:
    """Makes the task of `Group.all_reduce_compressed`; ranks must also agree on `detail`, a part of the signature."""
    dtype = native(x.dtype)
    if dtype not in (np.float32, np.float64):
        raise UnsupportedOp(f"only float32 and float64 can be compressed, not {dtype}")
    op = name_of_op(op)
    if op not in ("sum", "mean"):
        raise UnsupportedOp(f"op {op!r} cannot be compressed: sum and mean can")
    if not 0 <= exact <= x.size:
        raise SizeMismatch(f"exact={exact} of an array of {x.size} elements, at rank {engine.mesh.rank}")
    if memory.feedback:
        memory.check(x.size - exact, dtype)
    words = f"op={op} compression={words_of(codec)}{f' exact={exact}' if exact else ''}{detail}"
    signature = engine.sign("all_reduce", words, dtype, x.shape).encode()
    if out is not None:
        check_out(out, dtype, x.shape)

    def body(call: CollectiveCall) -> Array:
        result = landing(out, x, dtype, x.shape, in_place=True)
        base, flat = as_flat(x), result.reshape(-1)
        if engine.mesh.size == 1:  # nothing travels, so nothing is compressed
            flat[...] = base
            return deliver(result, out)
        # Infinities are valid values here, and a warning on one rank is no use.
        with np.errstate(all="ignore"):
            _Exchange(engine, codec, op, base, flat, exact, memory, empty).run(call, choose)
        memory.wrote()
        return deliver(result, out)

    return Task(signature, body)


class _Exchange:
    """One compressed call at one rank. `base` and `flat` have shape [N + E] and may be the same array."""

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        op: str,
        base: Array,
        flat: Array,
        exact: int,
        memory: Memory,
        empty: Empty,
    ) -> None:
        self._engine, self._codec, self._base, self._flat, self._memory = engine, codec, base, flat, memory
        self._rank, self._world = engine.mesh.rank, engine.mesh.size
        self._divisor = self._world if op == "mean" else 1
        n = base.size - exact
        self._exact = slice(n, base.size)
        self._chunks = chunk_bounds(n, self._world)
        self._sizes = tuple(sum(codec.nbytes(hi - lo) for lo, hi in self._pieces(c)) for c in range(self._world))
        tail, own = exact * base.itemsize, self._sizes[self._rank]
        others = [c != self._rank for c in range(self._world)]
        self._sent = tuple(size + tail if other else 0 for size, other in zip(self._sizes, others, strict=True))
        self._received = tuple(own + tail if other else 0 for other in others)
        # Other ranks have read what was sent by the time the totals arrive, so both use the same memory.
        self._out_area = memory.area("out", max(sum(self._sent), sum(self._sizes)), empty)
        self._in_area = memory.area("in", sum(self._received), empty)
        self._residuals = memory.residuals(n, base.dtype) if memory.feedback else None
        piece = min(n, PIECE)
        self._values, self._total = np.empty(piece, base.dtype), np.empty(piece, base.dtype)
        self._narrow, self._decoded, self._scratch = (np.empty(piece, np.float32) for _ in range(3))

    def run(self, call: CollectiveCall, choose: Chooser) -> None:
        rank, world, sizes = self._rank, self._world, self._sizes
        frame = segment(self._out_area.dtype, self._engine)
        self._encode_all()
        program = all_to_all_program(rank, world, self._sent, self._received, frame)
        sent = self._out_area[: sum(self._sent)]
        self._engine.run(call, program, sent, self._in_area)

        totals = self._out_area[: sum(sizes)]
        starts = [0, *accumulate(sizes)]
        own = totals[starts[rank] : starts[rank + 1]]
        self._add_up(own)
        self._flat[self._exact] = self._exact_sum()

        schedule = choose("all_gather", totals.nbytes, world).schedule
        program = all_gather_program(schedule, rank, world, sizes, frame)
        second = CollectiveCall(call.operation, call.signature, call.started, call.deadline, 1)
        self._engine.run(second, program, totals if schedule == "bruck" else own, totals)
        for c in range(world):
            self._decode_chunk(c, totals[starts[c] : starts[c + 1]])

    def _pieces(self, c: int) -> Iterator[tuple[int, int]]:
        """Yields the bounds of the pieces of a chunk; all but the last consist of whole blocks."""
        lo, hi = self._chunks[c]
        step = PIECE - PIECE % self._codec.block
        for start in range(lo, hi, step):
            yield start, min(start + step, hi)

    def _encode_all(self) -> None:
        """Encodes the chunks that other ranks own, each followed by the exact elements."""
        at = 0
        exact = self._base[self._exact].view(np.uint8)
        for c in range(self._world):
            if c == self._rank:
                continue
            for lo, hi in self._pieces(c):
                nbytes = self._codec.nbytes(hi - lo)
                self._encode(self._entering(lo, hi), self._out_area[at : at + nbytes], lo, hi, 1)
                at += nbytes
            self._out_area[at : at + exact.size] = exact
            at += exact.size

    def _entering(self, lo: int, hi: int) -> Array:
        """Returns this rank's values plus the rounding errors of the last call, shape [hi - lo]."""
        if self._residuals is None:
            return self._base[lo:hi]
        values = self._values[: hi - lo]
        np.add(self._base[lo:hi], self._residuals[0][lo:hi], out=values)
        return values

    def _encode(self, values: Array, into: Array, lo: int, hi: int, scale: int) -> None:
        """Encodes a piece, and keeps its rounding errors times `scale`."""
        n = hi - lo
        narrow = values
        if values.dtype != np.float32:
            narrow = self._narrow[:n]
            narrow[...] = values
        self._codec.encode(narrow, into, self._scratch[:n])
        if self._residuals is None:
            return
        decoded, left = self._decoded[:n], self._residuals[1][lo:hi]
        self._codec.decode(into, decoded)
        np.subtract(values, decoded, out=left)
        if scale != 1:
            np.multiply(left, left.dtype.type(scale), out=left)
        # An infinity or NaN is no rounding error and would spoil all later steps. NaN shows up in max and min.
        if not (abs(left.max()) <= _LARGEST and abs(left.min()) <= _LARGEST):
            left[~np.isfinite(left)] = 0

    def _add_up(self, into: Array) -> None:
        """Adds up the chunk that this rank owns, in rank order, and encodes the totals."""
        places = self._places()
        at = 0
        for lo, hi in self._pieces(self._rank):
            nbytes, total, decoded = self._codec.nbytes(hi - lo), self._total[: hi - lo], self._decoded[: hi - lo]
            own = self._entering(lo, hi)
            for peer, place in enumerate(places):
                term = own
                if peer != self._rank:
                    self._codec.decode(self._in_area[place + at : place + at + nbytes], decoded)
                    term = decoded
                if peer == 0:
                    total[...] = term
                else:
                    np.add(total, term, out=total)
            if self._divisor != 1:
                np.true_divide(total, total.dtype.type(self._divisor), out=total)
            # The next call adds this error before it divides by W, so it is kept W times as large.
            self._encode(total, into[at : at + nbytes], lo, hi, self._divisor)
            at += nbytes

    def _exact_sum(self) -> Array:
        """Returns the sum of all ranks' exact elements, in rank order, shape [E]; all ranks compute the same bits."""
        total = np.zeros(0, self._base.dtype)
        for peer, (place, nbytes) in enumerate(zip(self._places(), self._received, strict=True)):
            term = self._base[self._exact]
            if peer != self._rank:
                term = self._in_area[place + self._sizes[self._rank] : place + nbytes].view(self._base.dtype)
            total = term.copy() if peer == 0 else np.add(total, term, out=total)
        if self._divisor != 1:
            np.true_divide(total, total.dtype.type(self._divisor), out=total)
        return total

    def _places(self) -> list[int]:
        """Returns the offset of the bytes that each rank sent."""
        return [0, *accumulate(self._received)][:-1]

    def _decode_chunk(self, c: int, data: Array) -> None:
        at = 0
        for lo, hi in self._pieces(c):
            nbytes = self._codec.nbytes(hi - lo)
            into = self._flat[lo:hi] if self._flat.dtype == np.float32 else self._decoded[: hi - lo]
            self._codec.decode(data[at : at + nbytes], into)
            if into.dtype != self._flat.dtype:
                self._flat[lo:hi] = into
            at += nbytes
