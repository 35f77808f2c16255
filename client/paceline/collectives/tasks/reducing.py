"""all_reduce, reduce and reduce_scatter in terms of arrays.

Letters: N elements, W world size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from paceline.arrays import Array, as_flat, check_out, deliver, landing, native
from paceline.collectives.arithmetic import Arithmetic, arithmetic
from paceline.collectives.engine import Call, Engine
from paceline.collectives.ops import Reduction, reduction
from paceline.collectives.program import Program
from paceline.collectives.programs import all_reduce_program, reduce_program, reduce_scatter_program
from paceline.collectives.rows import Sums
from paceline.collectives.tasks.task import Chooser, Task, segment
from paceline.errors import SizeMismatch, UnsupportedOp

__all__ = ["reduce_task", "reducing_task"]

ORDERS = ("fastest", "rank")

_Key: TypeAlias = tuple[str, str, np.dtype[Any], tuple[int, ...], str, str, Chooser]
"""Collective, op, dtype, shape, order, detail, chooser."""

_MOST_PLANS = 256
"""More than the operations that a step repeats."""


def reducing_task(
    engine: Engine,
    collective: Literal["all_reduce", "reduce_scatter"],
    x: Array,
    op: str,
    out: Array | None,
    choose: Chooser,
    order: str = "fastest",
    detail: str = "",
    divisor: Callable[[], float] | None = None,
) -> Task[Array]:
    """See `Group.all_reduce` and `Group.reduce_scatter`; `detail` is more that ranks must agree on."""
    if divisor is not None:
        detail += _divided(op, x)
    op = op if type(op) is str else repr(op)  # a key must be hashable; what it is not, `reduction` says
    key = (collective, op, x.dtype, x.shape, order, detail, choose)
    plan: _Plan = engine.plans.get(key) or _plan(engine, key, x)
    if out is not None:
        check_out(out, plan.dtype, plan.shape)

    def body(call: Call) -> Array:
        result = landing(out, x, plan.dtype, plan.shape, in_place=collective == "all_reduce")
        how = plan.how if divisor is None else arithmetic(plan.reduce, engine.mesh.size, divisor())
        _reduce(engine, call, plan.program, x, result, how)
        return deliver(result, out)

    return Task(plan.signature, body)


class _Plan(NamedTuple):
    """What follows from the arguments of an all_reduce or a reduce_scatter, but for what its arrays hold."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    reduce: Reduction
    how: Arithmetic
    signature: bytes
    program: Program


def _plan(engine: Engine, key: _Key, x: Array) -> _Plan:
    """Training repeats a few operations for ever: each is planned once."""
    collective, op, _, shape, order, detail, choose = key
    mesh, dtype = engine.mesh, native(x.dtype)
    reduce = reduction(op, dtype)
    if collective == "reduce_scatter":
        shape = _part(x, mesh.rank, mesh.size)
    signature = engine.sign(collective, f"op={op}{_order(order)}{detail}", dtype, x.shape).encode()
    choice = choose(collective, x.nbytes, mesh.size, sums=_sums(reduce, order), nodes=engine.nodes)
    at = choice.schedule, mesh.rank, mesh.size, x.size, segment(dtype, engine)
    program = all_reduce_program(*at, engine.nodes) if collective == "all_reduce" else reduce_scatter_program(*at)
    if len(engine.plans) >= _MOST_PLANS:
        engine.plans.clear()
    how = arithmetic(reduce, mesh.size)
    plan = engine.plans[key] = _Plan(dtype, shape, reduce, how, signature, program)
    return plan


def _part(x: Array, rank: int, world: int) -> tuple[int, ...]:
    """The shape of one of W equal parts of axis 0.

    Raises:
        SizeMismatch: it has none.
    """
    if world == 1:
        return x.shape
    if x.ndim == 0 or x.shape[0] % world:
        text = f"reduce_scatter cuts axis 0 into {world} equal parts, and shape {x.shape} has none, at rank {rank}"
        raise SizeMismatch(text)
    return (x.shape[0] // world, *x.shape[1:])


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
    choice = choose("reduce", x.nbytes, mesh.size, sums=_sums(reduce, order), nodes=engine.nodes)
    program = reduce_program(choice.schedule, mesh.rank, mesh.size, root, x.size, segment(dtype, engine))

    def body(call: Call) -> Array | None:
        result = landing(out, x, dtype, x.shape, in_place=True) if at_root else np.empty(0, dtype)
        _reduce(engine, call, program, x, result, arithmetic(reduce, mesh.size))
        return deliver(result, out) if at_root else None

    return Task(signature, body)


def _reduce(engine: Engine, call: Call, program: Program, x: Array, result: Array, how: Arithmetic) -> None:
    flat = result.reshape(-1)
    base = flat if x is result else as_flat(x)
    if base is not flat and np.may_share_memory(base, flat):
        base = flat
    engine.run(call, program, base, flat, how)
    if engine.mesh.size == 1:  # where nothing is added up, nothing is complete
        how.finish(flat)


def _sums(reduce: Reduction, order: str) -> Sums:
    return Sums.IN_RANK_ORDER if order == "rank" else reduce.sums


def _divided(op: str, x: Array) -> str:
    if op != "sum" or x.dtype.kind not in "fcV":
        raise UnsupportedOp(f"a divisor is for sums of floats and complex numbers, not for {op!r} of {x.dtype}")
    return " divided=yes"


def _order(order: str) -> str:
    if order not in ORDERS:
        raise UnsupportedOp(f"order is one of {', '.join(ORDERS)}, not {order!r}")
    return "" if order == "fastest" else f" order={order}"
