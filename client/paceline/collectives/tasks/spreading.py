"""broadcast and scatter in terms of arrays: a receiver may know neither dtype nor shape.

Letters: N elements, W world size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.arrays import Array, as_array, as_flat, check_out, deliver, landing, native, new_array
from paceline.collectives.engine import Call, Engine
from paceline.collectives.program import Program
from paceline.collectives.programs import broadcast_program, scatter_program
from paceline.collectives.schedules.spreading import tree_parent
from paceline.collectives.tasks.task import Chooser, Task, segment
from paceline.errors import LimitExceeded, SizeMismatch, UnsupportedOp

__all__ = ["broadcast_task", "scatter_task"]


def broadcast_task(
    engine: Engine, x: Array | None, root: int, out: Array | None, choose: Chooser, kind: str = "broadcast"
) -> Task[Array]:
    """See `Group.broadcast`; `kind` is what the signature calls it."""
    mesh = engine.mesh

    def program(n: int, dtype: np.dtype[Any]) -> Program:
        schedule = choose("broadcast", n * dtype.itemsize, mesh.size, nodes=engine.nodes).schedule
        return broadcast_program(schedule, mesh.rank, mesh.size, root, n, segment(dtype, engine))

    if mesh.rank == root and x is None:
        raise UnsupportedOp(f"broadcast needs an array at its root, rank {root}; it got None")
    like = x if x is not None else out
    if like is None:
        parent = tree_parent(mesh.rank, mesh.size, root)
        assert parent is not None, "only the root has no parent, and it knows its array"
        return _receive_unknown(engine, kind, root, parent, program)
    dtype, shape = native(like.dtype), like.shape
    signature = engine.sign(kind, f"root={root}", dtype, shape).encode()
    if out is not None:
        check_out(out, dtype, shape)
    plan = program(like.size, dtype)

    def body(call: Call) -> Array:
        result = landing(out, x if mesh.rank == root else None, dtype, shape, in_place=True)
        flat = result.reshape(-1)
        base = flat if mesh.rank != root or x is None or np.may_share_memory(x, result) else as_flat(x)
        engine.run(call, plan, base, flat)
        return deliver(result, out)

    return Task(signature, body)


def scatter_task(
    engine: Engine, xs: Sequence[npt.ArrayLike] | Array | None, root: int, out: Array | None
) -> Task[Array]:
    """See `Group.scatter`."""
    mesh = engine.mesh

    def program(n: int, dtype: np.dtype[Any]) -> Program:
        return scatter_program(mesh.rank, mesh.size, root, n, segment(dtype, engine))

    if mesh.rank == root:
        whole = _whole(xs, mesh.size, root)
        dtype, shape = native(whole.dtype), whole.shape[1:]
    elif out is None:
        return _receive_unknown(engine, "scatter", root, root, program)
    else:
        whole, dtype, shape = None, native(out.dtype), out.shape
    signature = engine.sign("scatter", f"root={root}", dtype, shape).encode()
    if out is not None:
        check_out(out, dtype, shape)
    plan = program(prod(shape), dtype)

    def body(call: Call) -> Array:
        result = landing(out, whole, dtype, shape)
        flat = result.reshape(-1)
        engine.run(call, plan, flat if whole is None else as_flat(whole), flat)
        return deliver(result, out)

    return Task(signature, body)


def _receive_unknown(
    engine: Engine, kind: str, root: int, source: int, program: Callable[[int, np.dtype[Any]], Program]
) -> Task[Array]:
    """A receiver that learns dtype and shape from the first frame."""
    asked = engine.sign(kind, f"root={root}")

    def body(call: Call) -> Array:
        first, dtype, shape = engine.first_frame(call, source, asked)
        try:
            result = new_array(shape, dtype)
        except LimitExceeded as error:
            engine.disagree(call, source, f"announces an array that cannot be: {error}")
        flat = result.reshape(-1)
        told = Call(call.operation, first.signature, call.started, call.deadline)
        engine.run(told, program(flat.size, flat.dtype), flat, flat, first=first)
        return result

    return Task(asked.encode(), body)


def _whole(xs: Sequence[npt.ArrayLike] | Array | None, world: int, root: int) -> Array:
    """The root's parts as one array, shape [W, ...]."""
    needs = f"scatter needs {world} arrays of one dtype and shape at its root, rank {root}; it got"
    if xs is None:
        raise UnsupportedOp(f"{needs} None")
    if isinstance(xs, np.ndarray):
        if xs.ndim == 0 or len(xs) != world:
            raise SizeMismatch(f"{needs} one of shape {xs.shape}")
        return as_array(xs)
    if not isinstance(xs, Sequence):
        raise UnsupportedOp(f"{needs} {type(xs).__name__}")
    parts = [as_array(part) for part in xs]
    if len(parts) != world:
        raise SizeMismatch(f"{needs} {len(parts)}")
    kinds = {(native(part.dtype), part.shape) for part in parts}
    if len(kinds) > 1:
        raise SizeMismatch(f"{needs} {', '.join(sorted(f'{dtype}{shape}' for dtype, shape in kinds))}")
    return np.stack(parts)
