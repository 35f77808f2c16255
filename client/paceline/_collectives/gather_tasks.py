"""all_gather, gather and all_to_all in terms of arrays; if parts are uneven, ranks first exchange numbers of rows.

Letters: N elements, W world size, S shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any

import numpy as np

from paceline._base.arrays import MAX_ARRAY_BYTES, Array, as_flat, check_out, deliver, landing, native, same_elements
from paceline._collectives.engine import CollectiveCall, Engine
from paceline._collectives.program import Program, all_gather_program, all_to_all_program, gather_program
from paceline._collectives.tasks import Chooser, Task, segment
from paceline.errors import LimitExceeded, SizeMismatch

_COUNT = np.dtype(np.int64)

_MOST_PLANS = 256
"""Most plans that a group keeps; when there are more, it forgets all."""


def all_gather_task(
    engine: Engine,
    x: Array,
    out: Array | None,
    choose: Chooser,
    *,
    uneven: bool = False,
    kind: str = "all_gather",
    detail: str = "",
) -> Task[Array]:
    """Makes the task of `Group.all_gather`; `kind` and `detail` go into the signature, on which ranks must agree."""
    mesh = engine.mesh
    gathering = _plan(engine, kind, detail.strip(), x, choose, uneven=uneven)
    if out is not None and not uneven:
        check_out(out, gathering.dtype, gathering.shape(gathering.even))

    def body(call: CollectiveCall) -> Array:
        counts = gathering.counts(call)
        result = gathering.landing(call, counts, out, x)
        schedule, program = gathering.way(counts)
        flat, base = result.reshape(-1), as_flat(x)
        if schedule == "bruck":
            lo = sum(counts[: mesh.rank]) * gathering.row
            flat[lo : lo + base.size] = base
            base = flat
        engine.run(gathering.second(call), program, base, flat)
        return deliver(result, out)

    return Task(gathering.signature, body)


def gather_task(
    engine: Engine,
    x: Array,
    root: int,
    out: Array | None,
    choose: Chooser,
    *,
    uneven: bool = False,
    kind: str = "gather",
) -> Task[Array | None]:
    """Makes the task of `Group.gather`; `kind` is its name in the signature."""
    mesh = engine.mesh
    gathering = _plan(engine, kind, f"root={root}", x, choose, uneven=uneven)
    at_root = mesh.rank == root
    if out is not None and at_root and not uneven:
        check_out(out, gathering.dtype, gathering.shape(gathering.even))

    def body(call: CollectiveCall) -> Array | None:
        counts = gathering.counts(call)
        # Elsewhere only the own size counts; with the others' sizes too, programs would be compiled more often.
        sizes = tuple(count * gathering.row if at_root or r == mesh.rank else 0 for r, count in enumerate(counts))
        result = gathering.landing(call, counts, out, x) if at_root else np.empty(0, gathering.dtype)
        program = gather_program(mesh.rank, mesh.size, root, sizes, segment(gathering.dtype, engine))
        engine.run(gathering.second(call), program, as_flat(x), result.reshape(-1))
        return deliver(result, out) if at_root else None

    return Task(gathering.signature, body)


def all_to_all_task(
    engine: Engine,
    x: Array,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    out: Array | None,
) -> Task[Array]:
    """Makes the task of `Group.all_to_all`."""
    mesh, dtype, world = engine.mesh, native(x.dtype), engine.mesh.size
    uneven = send_counts is not None or recv_counts is not None
    if x.ndim == 0:
        raise SizeMismatch(
            f"all_to_all cuts axis 0 into {world} parts, but a 0-d array has no axis 0, at rank {mesh.rank}"
        )
    sent = _counts("send_counts", send_counts, world)
    if sent is None:
        if x.shape[0] % world:
            text = f"all_to_all needs {world} equal parts: axis 0 of shape {x.shape} at rank {mesh.rank} has none"
            raise SizeMismatch(f"{text}; give send_counts for parts of different sizes")
        sent = [x.shape[0] // world] * world
    if sum(sent) != x.shape[0]:
        raise SizeMismatch(
            f"send_counts {sent} add up to {sum(sent)} rows, but x has {x.shape[0]}, at rank {mesh.rank}"
        )
    expected = _counts("recv_counts", recv_counts, world)
    row = prod(x.shape[1:])
    if uneven:
        signature = engine.sign("all_to_all", "counts=any", dtype, x.shape[1:]).encode()
    else:
        signature = engine.sign("all_to_all", "", dtype, x.shape).encode()
        if out is not None:
            check_out(out, dtype, x.shape)

    def body(call: CollectiveCall) -> Array:
        received = sent if not uneven else _exchange_counts(engine, call, sent, expected, row * dtype.itemsize)
        shape = (sum(received), *x.shape[1:])
        if out is not None:
            check_out(out, dtype, shape)
        result = _landing(engine, call, received, out, x, dtype, shape)
        sizes_out, sizes_in = (tuple(count * row for count in counts) for counts in (sent, received))
        program = all_to_all_program(mesh.rank, world, sizes_out, sizes_in, segment(dtype, engine))
        second = call if not uneven else CollectiveCall(call.operation, call.signature, call.started, call.deadline, 1)
        engine.run(second, program, as_flat(x), result.reshape(-1))
        return deliver(result, out)

    return Task(signature, body)


def _plan(engine: Engine, kind: str, detail: str, x: Array, choose: Chooser, *, uneven: bool) -> _Gathering:
    """Returns the cached plan of an operation, because training repeats a few; uneven rows may change in each call."""
    if uneven:
        return _Gathering(engine, kind, detail, x, choose, uneven=True)
    key = (kind, detail, x.dtype, x.shape, choose)
    plan: _Gathering | None = engine.plans.get(key)
    if plan is None:
        if len(engine.plans) >= _MOST_PLANS:
            engine.plans.clear()
        plan = engine.plans[key] = _Gathering(engine, kind, detail, x, choose, uneven=False)
    return plan


class _Gathering:
    """The common part of all_gather and gather: rows on axis 0, whose number may differ between ranks.

    It depends only on dtype and shape of `x`, so the group keeps it for the next call, without `x`.
    """

    def __init__(self, engine: Engine, kind: str, detail: str, x: Array, choose: Chooser, *, uneven: bool) -> None:
        self._engine = engine
        self._choose = choose
        self._uneven = uneven
        self.dtype = native(x.dtype)
        self._rows = x.shape[0] if x.ndim else 1
        self.even = [self._rows] * engine.mesh.size
        self._tail = x.shape[1:]
        self.row = prod(self._tail)
        shape = self._tail if uneven else x.shape
        detail = " ".join(filter(None, (detail, "rows=any" if uneven else "")))
        self.signature = engine.sign(kind, detail, self.dtype, shape).encode()
        self._way: tuple[list[int], tuple[str, Program]] | None = None

    def counts(self, call: CollectiveCall) -> list[int]:
        """Returns the number of rows of each rank."""
        mesh = self._engine.mesh
        if not self._uneven:
            return self.even
        counts = np.empty(mesh.size, _COUNT)
        schedule = self._choose("all_gather", counts.nbytes, mesh.size, nodes=self._engine.nodes).schedule
        program = all_gather_program(schedule, mesh.rank, mesh.size, (1,) * mesh.size, segment(_COUNT, self._engine))
        base = np.array([self._rows], _COUNT)
        if schedule == "bruck":
            counts[mesh.rank] = self._rows
            base = counts
        self._engine.run(call, program, base, counts)
        return _checked(self._engine, call, counts, self.row * self.dtype.itemsize)

    def way(self, counts: list[int]) -> tuple[str, Program]:
        """Returns the schedule of an all_gather of these rows, and this rank's program; caches the last result."""
        if self._way is None or self._way[0] != counts:
            mesh, nodes = self._engine.mesh, self._engine.nodes
            sizes = tuple(count * self.row for count in counts)
            schedule = self._choose("all_gather", sum(sizes) * self.dtype.itemsize, mesh.size, nodes=nodes).schedule
            program = all_gather_program(schedule, mesh.rank, mesh.size, sizes, segment(self.dtype, self._engine))
            self._way = counts, (schedule, program)
        return self._way[1]

    def second(self, call: CollectiveCall) -> CollectiveCall:
        """Returns the call that moves the rows themselves."""
        return CollectiveCall(call.operation, call.signature, call.started, call.deadline, 1) if self._uneven else call

    def shape(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of all rows together."""
        return (sum(counts), *self._tail)

    def landing(self, call: CollectiveCall, counts: Sequence[int], out: Array | None, x: Array) -> Array:
        """Returns the array that receives all rows."""
        shape = self.shape(counts)
        if out is not None:
            check_out(out, self.dtype, shape)
            if self._lies_in_place(counts, out, x):
                return out
        return _landing(self._engine, call, counts, out, x, self.dtype, shape)

    def _lies_in_place(self, counts: Sequence[int], out: Array, x: Array) -> bool:
        """Returns True if `x` is this rank's part of `out`: then nothing that is still to be read is overwritten."""
        if type(out) is not np.ndarray or not (out.flags.c_contiguous and out.dtype.isnative and out.ndim):
            return False
        lo = sum(counts[: self._engine.mesh.rank])
        return same_elements(x, out[lo : lo + self._rows])


def _landing(
    engine: Engine,
    call: CollectiveCall,
    counts: Sequence[int],
    out: Array | None,
    x: Array,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
) -> Array:
    """As `landing`; if there is no memory for all rows, blames the rank that announces the most."""
    try:
        return landing(out, x, dtype, shape)
    except LimitExceeded as error:
        most = max(range(len(counts)), key=counts.__getitem__)
        engine.disagree(call, most, f"announces {counts[most]} rows: {error}")


def _exchange_counts(
    engine: Engine, call: CollectiveCall, sent: Sequence[int], expected: Sequence[int] | None, row_bytes: int
) -> list[int]:
    """Exchanges counts, and returns the number of rows that each rank sends to this one."""
    mesh, ones = engine.mesh, (1,) * engine.mesh.size
    counts = np.empty(mesh.size, _COUNT)
    program = all_to_all_program(mesh.rank, mesh.size, ones, ones, segment(_COUNT, engine))
    engine.run(call, program, np.array(sent, _COUNT), counts)
    received = _checked(engine, call, counts, row_bytes)
    for peer, (told, hoped) in enumerate(zip(received, expected or received, strict=True)):
        if told != hoped:
            engine.disagree(
                call, peer, f"sends {told} rows to rank {mesh.peers[mesh.rank].rank}, which expects {hoped}"
            )
    return received


def _checked(engine: Engine, call: CollectiveCall, counts: Array, row_bytes: int) -> list[int]:
    """Checks counts of rows from the network: none is below 0 or exceeds what an array may have (I9)."""
    told = [int(count) for count in counts]
    for peer, count in enumerate(told):
        if count < 0 or sum(told[: peer + 1]) * max(row_bytes, 1) > MAX_ARRAY_BYTES:
            engine.disagree(call, peer, f"announces {count} rows, which is impossible")
    return told


def _counts(name: str, counts: Sequence[int] | None, world: int) -> list[int] | None:
    if counts is None:
        return None
    try:
        rows = [index(count) for count in counts]
    except TypeError:
        rows = []
    if len(rows) != world or min(rows) < 0:
        raise SizeMismatch(f"{name} must be {world} numbers of rows, each at least 0; got {counts!r}")
    return rows
