"""all_reduce, reduce and reduce_scatter in terms of arrays.

Letters: N elements, W world size.
"""

from __future__ import annotations

import numpy as np

from paceline.arrays import Array, as_flat, check_out, deliver, landing, native
from paceline.collectives.arithmetic import arithmetic
from paceline.collectives.engine import Call, Engine
from paceline.collectives.ops import Reduction, reduction
from paceline.collectives.program import Program
from paceline.collectives.programs import all_reduce_program, reduce_program, reduce_scatter_program
from paceline.collectives.rows import Sums
from paceline.collectives.tasks.task import Chooser, Task, segment
from paceline.errors import SizeMismatch, UnsupportedOp

__all__ = ["all_reduce_task", "reduce_scatter_task", "reduce_task"]

ORDERS = ("fastest", "rank")


def all_reduce_task(
    engine: Engine, x: Array, op: str, out: Array | None, choose: Chooser, order: str = "fastest", detail: str = ""
) -> Task[Array]:
    """See `Group.all_reduce`; `detail` is more that ranks must agree on, for the signature."""
    mesh, dtype = engine.mesh, native(x.dtype)
    reduce = reduction(op, dtype)
    signature = engine.sign("all_reduce", f"op={op}{_order(order)}{detail}", dtype, x.shape).encode()
    if out is not None:
        check_out(out, dtype, x.shape)
    choice = choose("all_reduce", x.nbytes, mesh.size, sums=_sums(reduce, order))
    program = all_reduce_program(choice.schedule, mesh.rank, mesh.size, x.size, segment(dtype))

    def body(call: Call) -> Array:
        result = landing(out, x, dtype, x.shape, in_place=True)
        _reduce(engine, call, program, x, result, reduce)
        return deliver(result, out)

    return Task(signature, body)


def reduce_task(
    engine: Engine, x: Array, op: str, root: int, out: Array | None, choose: Chooser, order: str = "fastest"
) -> Task[Array | None]:
    """See `Group.reduce`."""
    mesh, dtype = engine.mesh, native(x.dtype)
    reduce = reduction(op, dtype)
    signature = engine.sign("reduce", f"op={op} root={root}{_order(order)}", dtype, x.shape).encode()
    at_root = mesh.rank == root
    if out is not None and at_root:
        check_out(out, dtype, x.shape)
    choice = choose("reduce", x.nbytes, mesh.size, sums=_sums(reduce, order))
    program = reduce_program(choice.schedule, mesh.rank, mesh.size, root, x.size, segment(dtype))

    def body(call: Call) -> Array | None:
        result = landing(out, x, dtype, x.shape, in_place=True) if at_root else np.empty(0, dtype)
        _reduce(engine, call, program, x, result, reduce)
        return deliver(result, out) if at_root else None

    return Task(signature, body)


def reduce_scatter_task(
    engine: Engine, x: Array, op: str, out: Array | None, choose: Chooser, order: str = "fastest", detail: str = ""
) -> Task[Array]:
    """See `Group.reduce_scatter`; `detail` as for `all_reduce_task`."""
    mesh, dtype, world = engine.mesh, native(x.dtype), engine.mesh.size
    reduce = reduction(op, dtype)
    if world > 1 and (x.ndim == 0 or x.shape[0] % world):
        text = f"reduce_scatter cuts axis 0 into {world} equal parts, and shape {x.shape} has none, at rank {mesh.rank}"
        raise SizeMismatch(text)
    shape = x.shape if world == 1 else (x.shape[0] // world, *x.shape[1:])
    signature = engine.sign("reduce_scatter", f"op={op}{_order(order)}{detail}", dtype, x.shape).encode()
    if out is not None:
        check_out(out, dtype, shape)
    choice = choose("reduce_scatter", x.nbytes, world, sums=_sums(reduce, order))
    program = reduce_scatter_program(choice.schedule, mesh.rank, world, x.size, segment(dtype))

    def body(call: Call) -> Array:
        result = landing(out, x, dtype, shape)
        _reduce(engine, call, program, x, result, reduce)
        return deliver(result, out)

    return Task(signature, body)


def _reduce(engine: Engine, call: Call, program: Program, x: Array, result: Array, reduce: Reduction) -> None:
    base, flat = as_flat(x), result.reshape(-1)
    if np.may_share_memory(base, flat):
        base = flat
    # Infinities are values here; a warning on one rank would help nobody.
    with np.errstate(all="ignore"):
        engine.run(call, program, base, flat, arithmetic(reduce, engine.mesh.size))


def _sums(reduce: Reduction, order: str) -> Sums:
    return Sums.IN_RANK_ORDER if order == "rank" else reduce.sums


def _order(order: str) -> str:
    if order not in ORDERS:
        raise UnsupportedOp(f"order is one of {', '.join(ORDERS)}, not {order!r}")
    return "" if order == "fastest" else f" order={order}"
