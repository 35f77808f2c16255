"""What each collective means in terms of arrays: checked at the call, carried out later by the engine.

A task is made in the caller's thread, where user mistakes raise; its body runs when the operation's turn has come.

Letters: N elements, W world size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from paceline.arrays import Array, as_flat, check_out, deliver, landing, native
from paceline.collectives.choose import Chooser
from paceline.collectives.engine import Call, Engine
from paceline.collectives.ops import reduction
from paceline.collectives.program import SEGMENT_BYTES, all_reduce_program, barrier_program, broadcast_program
from paceline.collectives.schedules import tree_parent
from paceline.errors import UnsupportedOp
from paceline.signature import Signature

__all__ = ["Task", "all_reduce_task", "barrier_task", "broadcast_task"]

T = TypeVar("T")

_NOTHING = np.empty(0, np.uint8)


class Task(NamedTuple, Generic[T]):
    """A collective, ready to run.

    Attributes:
        signature: what its part 0 says.
        body: does it, once.
    """

    signature: bytes
    body: Callable[[Call], T]


def all_reduce_task(
    engine: Engine, x: Array, op: str, out: Array | None, choose: Chooser, detail: str = ""
) -> Task[Array]:
    """See `Group.all_reduce`; `detail` is more that ranks must agree on, for the signature."""
    mesh, dtype = engine.mesh, native(x.dtype)
    reduce = reduction(op, dtype)
    signature = Signature("all_reduce", f"op={op}{detail}", dtype, x.shape).encode()
    if out is not None:
        check_out(out, dtype, x.shape)
    schedule = choose(x.nbytes, mesh.size).schedule
    program = all_reduce_program(schedule, mesh.rank, mesh.size, x.size, _segment(dtype))

    def body(call: Call) -> Array:
        result, base = landing(out, x, dtype, x.shape), as_flat(x)
        with np.errstate(all="ignore"):  # infinities are values here; a warning on one rank would help nobody
            engine.run(call, program, base, result.reshape(-1), reduce)
        if not program.covered:
            result.reshape(-1)[:] = base
        return deliver(result, out)

    return Task(signature, body)


def broadcast_task(engine: Engine, x: Array | None, root: int, out: Array | None) -> Task[Array]:
    """See `Group.broadcast`."""
    mesh = engine.mesh
    like = x if x is not None else out
    if mesh.rank == root and x is None:
        raise UnsupportedOp(f"broadcast needs an array at its root, rank {root}; it got None")
    if like is None:
        return _broadcast_of_unknown(engine, root)
    dtype, shape, size = native(like.dtype), like.shape, like.size
    signature = Signature("broadcast", f"root={root}", dtype, shape).encode()
    if out is not None:
        check_out(out, dtype, shape)
    program = broadcast_program(mesh.rank, mesh.size, root, size, _segment(dtype))

    def body(call: Call) -> Array:
        if mesh.rank != root:
            result = landing(out, None, dtype, shape)
            flat = result.reshape(-1)
            engine.run(call, program, flat, flat)
            return deliver(result, out)
        assert x is not None
        result, base = landing(out, x, dtype, shape), as_flat(x)
        engine.run(call, program, base, base)
        if result is not x:
            result.reshape(-1)[:] = base
        return deliver(result, out)

    return Task(signature, body)


def _broadcast_of_unknown(engine: Engine, root: int) -> Task[Array]:
    """A receiver that learns dtype and shape from the first frame."""
    mesh = engine.mesh
    asked = Signature("broadcast", f"root={root}")
    parent = tree_parent(mesh.rank, mesh.size, root)
    assert parent is not None, "only the root has no parent, and it knows its array"

    def body(call: Call) -> Array:
        first, dtype, shape = engine.first_frame(call, parent, asked)
        result = np.empty(shape, dtype)
        flat = result.reshape(-1)
        program = broadcast_program(mesh.rank, mesh.size, root, flat.size, _segment(flat.dtype))
        told_call = Call(call.operation, first.signature, call.started, call.deadline)
        engine.run(told_call, program, flat, flat, first=first)
        return result

    return Task(asked.encode(), body)


def barrier_task(engine: Engine) -> Task[None]:
    """See `Group.barrier`."""
    program = barrier_program(engine.mesh.rank, engine.mesh.size)
    return Task(b"barrier", lambda call: engine.run(call, program, _NOTHING, _NOTHING))


def _segment(dtype: np.dtype[Any]) -> int:
    return SEGMENT_BYTES // dtype.itemsize
