"""The direct all_reduce in place between members that share memory: each rank shows the others all of its array, once.

By "direct" it lends each of them their chunk of its argument, and later its own chunk of the result: two frames to
describe, check and give back. In place both lie in one array, so that is promised whole (`Link.promise`). The others
take their terms from it at once, and the total when this rank says that it is there.

    rank 0   promises A   sums chunk 0 of B into A   says so   copies chunk 1 of B
    rank 1   promises B   sums chunk 1 of A into B   says so   copies chunk 0 of A

A rank writes to chunk c when rank c has said that its total is there: then rank c has read its term, which lay there.
Whoever has two arrays, or one that is not shared, lends chunk and total as by "direct"; which of the two a rank does,
the others see by its first frame. The sums are those of that schedule: in rank order, the same bits.

Letters: N elements, W world size, c chunk.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.arrays import Array, address_of, as_bytes, copy_bytes, from_bytes
from paceline.collectives.arithmetic import Arithmetic
from paceline.collectives.engine import Call, Engine
from paceline.collectives.program import Bounds
from paceline.collectives.rows import chunk_bounds
from paceline.links.frame import MAX_FRAME_BYTES

__all__ = ["MOST_BYTES", "reduce_whole"]

MOST_BYTES = MAX_FRAME_BYTES
"""Of an array: it is one frame."""


def reduce_whole(engine: Engine, call: Call, base: Array, out: Array, arithmetic: Arithmetic) -> None:
    """Returns when `out` holds the result, and nobody reads `base` or `out` any more.

    Args:
        engine: moves the frames.
        call: the call.
        base: this rank's value, shape [N]; not written to unless it is `out`.
        out: where the result goes, shape [N]; may be `base`.
        arithmetic: sums; does not scale.

    Raises:
        PacelineError: the generation has failed, here or elsewhere; every rank gets the same.
    """
    rank, dtype = engine.mesh.rank, base.dtype
    (first, last), theirs = _places(rank, engine.mesh.size, base.nbytes, base.itemsize)
    in_place = base is out
    result, at = as_bytes(out), address_of(out)
    values, values_at = (result, at) if in_place else (as_bytes(base), address_of(base))

    promised = set()
    for peer, (begin, end) in theirs:
        if in_place and engine.promise(call, peer, 0, result, at):
            promised.add(peer)
        else:
            engine.send(call, peer, 0, values[begin:end], values_at + begin, lend=True)

    frames, terms = [], {rank: from_bytes(values[first:last], dtype)}
    for peer, place in theirs:
        frame = engine.receive(call, peer, 0, last - first, len(result))
        term = memoryview(frame.payload)
        terms[peer] = from_bytes(term[first:last] if frame.promised else term, dtype)
        frames.append((peer, place, frame))
    arithmetic.fold(terms, from_bytes(result[first:last], dtype))

    for peer, _ in theirs:
        if peer in promised:
            engine.fulfil(peer, 0)
        else:
            engine.send(call, peer, 1, result[first:last], at + first, lend=True)
    for peer, (begin, end), frame in frames:
        if frame.promised:
            engine.await_piece(call, peer, 0)
            total = memoryview(frame.payload)[begin:end]
        else:
            total = memoryview(engine.receive(call, peer, 1, end - begin).payload)
        copy_bytes(total, result[begin:end])
    engine.release()
    engine.finish(call)


@lru_cache(maxsize=256)
def _places(rank: int, world: int, nbytes: int, itemsize: int) -> tuple[Bounds, tuple[tuple[int, Bounds], ...]]:
    """Where this rank's chunk lies in an array, and the others with theirs, in bytes."""
    places = [(lo * itemsize, hi * itemsize) for lo, hi in chunk_bounds(nbytes // itemsize, world)]
    others = ((rank + s) % world for s in range(1, world))
    return places[rank], tuple((peer, places[peer]) for peer in others)
