"""Programs: one rank's moves for a collective of one size, compiled from a schedule's rows and cached.

A program lists every frame that the rank sends and receives, in one order. Pure. Chunks are cut into segments, one
frame each. The receives of a step come in waves: the first frame of each peer, then the second of each. A send comes
right after the receive that makes it possible, so that a rank passes on a segment, and reduces it, while the next one
is still on its way. Because the order is known beforehand, running it takes one thread and no queue.

Letters: r rank, n elements, c chunk, j segment within a chunk, W world size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, TypeAlias

from paceline._collectives.rows import Action, Nodes, Row, chunk_bounds
from paceline._collectives.schedules import SCHEDULES, chunks_of, rows_of

SEGMENT_BYTES = 1 << 20
"""Bytes per frame, for messages and for collectives between nodes (within a node: `tasks.segment`). Source: as for
`AHEAD`."""

AHEAD = 4
"""In a step that sends and receives, a rank sends at most this many frames to a peer ahead of the waves. So a sender
keeps pace with its neighbours, and no rank waits for ever if links hold 4 frames each. Source: measured on gRPC streams
on loopback: 1 MiB x 4 was best, 1.5 GB/s."""

Bounds: TypeAlias = tuple[int, int]


class Area(IntEnum):
    """The array that a move reads or writes."""

    BASE = 0
    """The argument; never written to."""
    OUT = 1
    """The result."""
    SCRATCH = 2
    """Memory for chunks that a rank passes on and that have no place in its result."""


class Do(IntEnum):
    """The kind of a move; the values for received chunks are the same as in `Action`."""

    STORE = Action.STORE
    REDUCE = Action.REDUCE
    FINALIZE = Action.FINALIZE
    FOLD = Action.FOLD
    """Receive the last of the frames to fold."""
    HOLD = 4
    """Receive one of the frames to fold, but not the last."""
    SEND = 5


class ChunkLayout(NamedTuple):
    """The place of each chunk at one rank, as bounds in elements; None for a chunk without one.

    Attributes:
        base: this rank's own value, in the argument. A chunk without one is in the result from the start, or received.
        out: the place in the result.
    """

    base: Sequence[Bounds | None]
    out: Sequence[Bounds | None]


class Move(NamedTuple):
    """One frame of a program. Length 0 is an empty frame, which still shows that both ranks agree.

    It sends the elements in area `own` from `own_lo` on, or combines them with the received ones as `do` says, and puts
    the result in area `to` from `to_lo` on. `part` counts the frames to, or from, this peer.
    """

    do: Do
    peer: int
    part: int
    n: int
    own: Area
    own_lo: int
    to: Area
    to_lo: int


class Program(NamedTuple):
    """All moves of one rank in order.

    `keep` has (first in the argument, first in the result, elements) of each part that is copied from the argument.
    `scratch` is the number of elements of scratch memory. With `lend` a rank overwrites elements that it has sent only
    after all receivers have read them, so a link in the same memory may lend the elements instead of copying them.
    """

    moves: tuple[Move, ...]
    keep: tuple[tuple[int, int, int], ...]
    scratch: int
    lend: bool


class _Frame(NamedTuple):
    """Segments that travel together, as (chunk, segment); `at` is the offset of the first in its chunk."""

    pieces: tuple[tuple[int, int], ...]
    at: int
    n: int


class _Send(NamedTuple):
    """A send that is possible once `after` of this rank's receives are done; `order` breaks ties."""

    after: int
    order: tuple[int, int, int]
    move: Move


def compile_rows(
    rows: Sequence[Row],
    layout: ChunkLayout,
    segment: int,
    *,
    pass_on: bool = True,
    lend: bool = True,
) -> Program:
    """Turns one rank's rows into a program with `segment` elements per segment.

    With `pass_on` a rank may send a segment as soon as it has it; else only after all receives of earlier steps.
    """
    memory = _ChunkMemory(rows, layout, segment)
    receives: list[Move] = []
    sends: list[_Send] = []
    waves: list[int] = []  # how many receives are done at the end of each wave so far
    told: Counter[int] = Counter()
    heard: Counter[int] = Counter()
    latest: Counter[int] = Counter()  # by destination, whose frames keep their order: none is sent before earlier ones
    for step, group in groupby(rows, key=lambda row: row.step):
        outgoing: dict[int, list[_Frame]] = {}
        incoming: dict[int, list[tuple[_Frame, Action]]] = {}
        for row in group:
            if row.send_to is not None and row.send_chunk is not None:
                outgoing.setdefault(row.send_to, []).extend(memory.frames(row.send_chunk, row.span))
            if row.recv_from is not None and row.recv_chunk is not None:
                frames = memory.frames(row.recv_chunk, row.span)
                incoming.setdefault(row.recv_from, []).extend((frame, row.action) for frame in frames)
        start, first_wave = len(receives), len(waves)
        for wave in range(max(map(len, incoming.values()), default=0)):
            before = waves[-1] if waves else 0
            waves.append(before + sum(wave < len(frames) for frames in incoming.values()))
        for turn, (peer, frames_out) in enumerate(outgoing.items()):
            for m, frame in enumerate(frames_out):
                after = memory.made_by(frame) if pass_on else start
                if incoming and first_wave + m >= AHEAD:
                    after = max(after, waves[min(first_wave + m - AHEAD, len(waves) - 1)])
                latest[peer] = max(latest[peer], after)
                own, own_lo = memory.own(frame)
                move = Move(Do.SEND, peer, told[peer], frame.n, own, own_lo, own, own_lo)
                sends.append(_Send(latest[peer], (step, m, turn), move))
                told[peer] += 1
        receives.extend(_receives(incoming, memory, heard, start))
        memory.end_of_step(step)
    return Program(tuple(_interleave(receives, sends)), memory.kept(), memory.scratch, lend)


def _receives(
    incoming: dict[int, list[tuple[_Frame, Action]]], memory: _ChunkMemory, heard: Counter[int], done: int
) -> Iterator[Move]:
    """Yields the receives of a step, wave by wave; `done` receives came before."""
    folds = Counter(frame.pieces for frames in incoming.values() for frame, action in frames if action is Action.FOLD)
    for wave in range(max(map(len, incoming.values()), default=0)):
        for peer, frames in incoming.items():
            if wave >= len(frames):
                continue
            frame, action = frames[wave]
            do = Do(action)
            if action is Action.FOLD:
                folds[frame.pieces] -= 1
                do = Do.HOLD if folds[frame.pieces] else Do.FOLD
            own, own_lo = memory.own(frame)
            done += 1
            to, to_lo = memory.receive(frame, done, made=do is not Do.HOLD)
            yield Move(do, peer, heard[peer], frame.n, own, own_lo, to, to_lo)
            heard[peer] += 1


def _interleave(receives: Sequence[Move], sends: list[_Send]) -> Iterator[Move]:
    """Puts every send right after the receive that makes it possible.

    All sends of a step come before the first receive of the next step, because `after` never counts beyond the receives
    of its own step. So no receive overwrites elements that are still to be sent, even in place.
    """
    sends.sort(key=lambda send: (send.after, send.order))
    at = 0
    for done in range(len(receives) + 1):
        while at < len(sends) and sends[at].after <= done:
            yield sends[at].move
            at += 1
        if done < len(receives):
            yield receives[done]


class _ChunkMemory:
    """Tracks the place of each chunk's value, move by move."""

    def __init__(self, rows: Sequence[Row], layout: ChunkLayout, segment: int) -> None:
        self._layout = layout
        self._segment = segment
        self._sizes: dict[int, int] = {}
        self._made: dict[tuple[int, int], int] = {}  # by (c, j): number of receives after which this rank holds it
        self._slots: dict[int, int] = {}  # slots in scratch memory, by chunk
        self._free: list[int] = []
        self._used = 0
        self._last_send = {
            row.send_chunk + i: row.step for row in rows if row.send_chunk is not None for i in range(row.span)
        }
        received = {row.recv_chunk + i for row in rows if row.recv_chunk is not None for i in range(row.span)}
        self._received = received
        self._slot_size = max((self._size(c) for c in received if layout.out[c] is None), default=0)

    @property
    def scratch(self) -> int:
        return self._used * self._slot_size

    def frames(self, chunk: int, span: int) -> list[_Frame]:
        """Returns a run of chunks as frames: one frame if they fit a segment, else each chunk cut into segments."""
        chunks = range(chunk, chunk + span)
        total = sum(self._size(c) for c in chunks)
        if span > 1 and total <= self._segment:
            return [_Frame(tuple((c, 0) for c in chunks), 0, total)]
        frames = []
        for c in chunks:
            size = self._size(c)
            for j, at in enumerate(range(0, max(size, 1), self._segment)):
                frames.append(_Frame(((c, j),), at, min(self._segment, size - at)))
        return frames

    def made_by(self, frame: _Frame) -> int:
        return max(self._made.get(piece, 0) for piece in frame.pieces)

    def own(self, frame: _Frame) -> tuple[Area, int]:
        """Returns the place of this rank's value before the frame is received."""
        places = {self._place(c, made=(c, j) in self._made)[0] for c, j in frame.pieces}
        assert len(places) == 1, "chunks that travel together lie in one area"
        (chunk, segment), *_ = frame.pieces
        area, lo = self._place(chunk, made=(chunk, segment) in self._made)
        return area, lo + frame.at

    def receive(self, frame: _Frame, done: int, *, made: bool) -> tuple[Area, int]:
        """Returns the place of the value after the receive; notes which receive made it."""
        if made:
            self._made.update(dict.fromkeys(frame.pieces, done))
        area, lo = self._place(frame.pieces[0][0], made=True)
        return area, lo + frame.at

    def end_of_step(self, step: int) -> None:
        """Frees the scratch memory of chunks that will not be sent again."""
        for chunk in [c for c in self._slots if self._last_send.get(c, step) <= step]:
            self._free.append(self._slots.pop(chunk))

    def kept(self) -> tuple[tuple[int, int, int], ...]:
        own = enumerate(zip(self._layout.base, self._layout.out, strict=True))
        return tuple(
            (base[0], out[0], base[1] - base[0])
            for c, (base, out) in own
            if base is not None and out is not None and c not in self._received
        )

    def _size(self, chunk: int) -> int:
        size = self._sizes.get(chunk)
        if size is None:
            bounds = self._layout.base[chunk] or self._layout.out[chunk]
            assert bounds is not None, "a chunk that is sent or received has a size"
            size = self._sizes[chunk] = bounds[1] - bounds[0]
        return size

    def _place(self, chunk: int, *, made: bool) -> tuple[Area, int]:
        base, out = self._layout.base[chunk], self._layout.out[chunk]
        if base is not None and not made:
            return Area.BASE, base[0]
        if out is not None:
            return Area.OUT, out[0]
        if chunk not in self._slots:
            if self._free:
                self._slots[chunk] = self._free.pop()
            else:
                self._slots[chunk] = self._used
                self._used += 1
        return Area.SCRATCH, self._slots[chunk] * self._slot_size


@lru_cache(maxsize=512)
def all_reduce_program(schedule: str, rank: int, world: int, n: int, segment: int, nodes: Nodes = ()) -> Program:
    """Compiles an all_reduce: n elements at each rank, before and after."""
    bounds = chunk_bounds(n, chunks_of("all_reduce", schedule, world, nodes))
    return _compile("all_reduce", schedule, rank, world, ChunkLayout(bounds, bounds), segment, nodes=nodes)


@lru_cache(maxsize=256)
def reduce_program(schedule: str, rank: int, world: int, root: int, n: int, segment: int) -> Program:
    """Compiles a reduce: n elements at each rank; the result at the root."""
    layout = ChunkLayout([(0, n)], [(0, n) if rank == root else None])
    return _compile("reduce", schedule, rank, world, layout, segment, root)


@lru_cache(maxsize=256)
def reduce_scatter_program(schedule: str, rank: int, world: int, n: int, segment: int) -> Program:
    """Compiles a reduce_scatter: n elements at each rank, which gets its chunk of the result."""
    bounds = chunk_bounds(n, world)
    return _compile("reduce_scatter", schedule, rank, world, ChunkLayout(bounds, _only(rank, bounds)), segment)


@lru_cache(maxsize=256)
def broadcast_program(schedule: str, rank: int, world: int, root: int, n: int, segment: int) -> Program:
    """Compiles a broadcast: n elements at the root, then at every rank."""
    bounds = chunk_bounds(n, chunks_of("broadcast", schedule, world))
    layout = ChunkLayout(bounds if rank == root else [None] * len(bounds), bounds)
    return _compile("broadcast", schedule, rank, world, layout, segment, root)


@lru_cache(maxsize=256)
def scatter_program(rank: int, world: int, root: int, n: int, segment: int) -> Program:
    """Compiles a scatter: W * n elements at the root, of which each rank gets n."""
    bounds = chunk_bounds(n * world, world)
    out = _only(rank, bounds)
    layout = ChunkLayout(bounds if rank == root else [None] * world, out)
    return _compile("scatter", "direct", rank, world, layout, segment, root)


@lru_cache(maxsize=64)
def all_gather_program(schedule: str, rank: int, world: int, sizes: tuple[int, ...], segment: int) -> Program:
    """Compiles an all_gather: sizes[r] elements at rank r; then all of them at every rank, in rank order.

    With "bruck" a rank's own elements are in the result from the start, because they travel together with others'.
    """
    out = _places(sizes)
    base: list[Bounds | None] = [None] * world
    if schedule != "bruck":
        base[rank] = (0, sizes[rank])
    return _compile("all_gather", schedule, rank, world, ChunkLayout(base, out), segment)


@lru_cache(maxsize=64)
def gather_program(rank: int, world: int, root: int, sizes: tuple[int, ...], segment: int) -> Program:
    """Compiles a gather: sizes[r] elements at rank r; then all at the root. Elsewhere only the own size counts."""
    base: list[Bounds | None] = [None] * world
    base[rank] = (0, sizes[rank])
    layout = ChunkLayout(base, _places(sizes) if rank == root else [None] * world)
    return _compile("gather", "direct", rank, world, layout, segment, root)


@lru_cache(maxsize=64)
def all_to_all_program(
    rank: int, world: int, sent: tuple[int, ...], received: tuple[int, ...], segment: int
) -> Program:
    """Compiles an all_to_all: sent[c] elements for rank c and received[c] from rank c, in rank order."""
    base: list[Bounds | None] = [*_places(sent), *[None] * world]
    base[world + rank] = base[rank]
    layout = ChunkLayout(base, [*[None] * world, *_places(received)])
    return _compile("all_to_all", "pairwise", rank, world, layout, segment)


@lru_cache(maxsize=64)
def shift_program(to: int, source: int, n: int, segment: int) -> Program:
    """Compiles a shift: n elements for rank `to`, and n others from rank `source`."""
    layout = ChunkLayout([(0, n), None], [None, (0, n)])
    return compile_rows([Row(0, to, 0, source, 1)], layout, segment)


@lru_cache(maxsize=16)
def barrier_program(schedule: str, rank: int, world: int) -> Program:
    """Compiles a barrier, which sends empty frames."""
    return _compile("barrier", schedule, rank, world, ChunkLayout([(0, 0)], [(0, 0)]), 1)


def _compile(
    collective: str,
    schedule: str,
    rank: int,
    world: int,
    layout: ChunkLayout,
    segment: int,
    root: int = 0,
    nodes: Nodes = (),
) -> Program:
    how = SCHEDULES[collective][schedule]
    rows = rows_of(collective, schedule, rank, world, root, nodes)
    return compile_rows(rows, layout, segment, pass_on=how.pass_on, lend=how.lend)


def _places(sizes: Sequence[int]) -> list[Bounds]:
    """Returns the bounds of chunks of these sizes that lie one after the other."""
    return list(pairwise(accumulate(sizes, initial=0)))


def _only(rank: int, bounds: Sequence[Bounds]) -> list[Bounds | None]:
    """Returns the places in a result that holds only the rank's own chunk."""
    lo, hi = bounds[rank]
    return [(0, hi - lo) if c == rank else None for c in range(len(bounds))]
