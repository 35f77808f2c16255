"""Collectives in terms of arrays: all_reduce, reduce, reduce_scatter, broadcast, scatter and the barrier.

A task is a collective whose arguments have been checked. It is made in the caller's thread, where user mistakes raise;
its body runs when the operation's turn comes. Collectives that join arrays are in `gather_tasks.py`, the compressed
all_reduce is in `compressed_tasks.py`.

Letters: N elements, W world size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from paceline._base.arrays import Array, as_array, as_flat, check_out, deliver, landing, native, new_array
from paceline._base.sum_order import Node
from paceline._collectives.arithmetic import (
    Arithmetic,
    Reduction,
    arithmetic,
    name_of_op,
    reduction,
    tree_arithmetic,
)
from paceline._collectives.choose import Choice, where_of
from paceline._collectives.engine import CollectiveCall, Engine
from paceline._collectives.program import (
    Program,
    all_reduce_program,
    barrier_program,
    broadcast_program,
    reduce_program,
    reduce_scatter_program,
    scatter_program,
    shift_program,
)
from paceline._collectives.rows import SumRule
from paceline._collectives.schedules import tree_parent
from paceline._links.shm.control_segment import frame_bytes
from paceline._microbatch.sum_tree import joined, subtrees_by_rank
from paceline.errors import LimitExceeded, SizeMismatch, UnsupportedOp

T = TypeVar("T")

Chooser: TypeAlias = Callable[..., Choice]
"""Picks a schedule, as `choose.choose` does: maps (collective, bytes, world, sums=..., nodes=...) to a choice."""


class Task(NamedTuple, Generic[T]):
    """A collective, ready to run: `body` runs it, once, and part 0 carries the signature."""

    signature: bytes
    body: Callable[[CollectiveCall], T]


def barrier_task(engine: Engine, choose: Chooser) -> Task[None]:
    """Returns the task of `Group.barrier`, which is cached."""
    task: Task[None] | None = engine.plans.get(choose)
    if task is None:
        mesh = engine.mesh
        program = barrier_program(choose("barrier", 0, mesh.size, nodes=engine.nodes).schedule, mesh.rank, mesh.size)
        task = Task(engine.sign("barrier").encode(), lambda call: engine.run_empty(call, program))
        engine.plans[choose] = task
    return task


def segment(dtype: np.dtype[Any], engine: Engine) -> int:
    """Returns the elements per frame: twice as many in shared memory, where a frame costs more than its bytes.

    Frames are smaller if many ranks share a node, because each link then has less memory.

    Source: W=2, lent arrays of 16 and 64 MiB: 1.9 and 12.7 ms with frames of 1 MiB, 1.4 and 8.1 ms with 2 MiB.
    """
    nbytes = engine.segment_bytes * (2 if where_of(engine.nodes) == "one_node" else 1)
    return min(nbytes, frame_bytes(engine.neighbours)) // dtype.itemsize


ORDERS = ("fastest", "rank", "tree")

_Nodes: TypeAlias = tuple[tuple[Node, ...], ...]
"""For each rank, the nodes of the tree over microbatches whose sums it gives."""

_Key: TypeAlias = tuple[str, str, np.dtype[Any], tuple[int, ...], str, int, _Nodes | None, str, Chooser]
"""Collective, op, dtype, shape, order, leaves, nodes, detail, chooser."""

_MOST_PLANS = 256
"""Most plans that are kept: more than the operations that a step repeats."""


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
    terms: Sequence[Array] = (),
    leaves: int = 0,
    nodes: _Nodes | None = None,
) -> Task[Array]:
    """Makes the task of `Group.all_reduce` or `Group.reduce_scatter`, whose arguments most of these are.

    Ranks must also agree on `detail`, a part of the signature. `terms` are the sums of this rank's nodes (`sum_tree`),
    contiguous, the last of them `x`; empty for `x` alone. `leaves` is V, the leaves of the whole tree; 0 for one from
    each rank. `nodes` has for each rank the nodes that it has; None for the maximal subtrees of its range.
    """
    op = name_of_op(op)  # a key must be hashable; `reduction` refuses an invalid op
    if divisor is not None:
        detail += _divided(op, x)
    key = (collective, op, x.dtype, x.shape, order, leaves, nodes, detail, choose)
    plan: _ReductionPlan = engine.plans.get(key) or _plan(engine, key, x)
    if out is not None:
        check_out(out, plan.dtype, plan.shape)

    def body(call: CollectiveCall) -> Array:
        result = landing(out, x, plan.dtype, plan.shape, in_place=collective == "all_reduce")
        how = (
            plan.how if divisor is None else _arithmetic(plan.reduce, engine.mesh.size, order, leaves, nodes, divisor())
        )
        _reduce(engine, call, plan.program, x, result, how, [term.reshape(-1) for term in terms])
        return deliver(result, out)

    return Task(plan.signature, body)


def check_terms(
    terms: Sequence[Array], rank: int, world: int, leaves: int, nodes: _Nodes | None = None
) -> tuple[Array, ...]:
    """Returns the terms of `WrapperCore.all_reduce_tree` if a rank may give them; raises the errors named there."""
    if leaves < world:
        raise UnsupportedOp(f"{leaves} leaves for {world} ranks: each needs at least one, so take more microbatches")
    if nodes is None:
        nodes = subtrees_by_rank(world, leaves)
    elif len(nodes) != world or not _are_whole(nodes, leaves):
        raise UnsupportedOp(f"nodes={nodes} are not those of {leaves} leaves at {world} ranks")
    wanted = max(1, len(nodes[rank]))
    if len(terms) != wanted:
        raise UnsupportedOp(
            f"rank {rank} of {world} has {wanted} subtrees of {leaves} leaves, but gave {len(terms)} arrays"
        )
    first = terms[0]
    for term in terms:
        if term.dtype not in (np.float32, np.float64) or not term.flags.c_contiguous or not term.dtype.isnative:
            raise UnsupportedOp(f"the sums of leaves must be contiguous float32 or float64, not {term.dtype}")
        if (term.dtype, term.shape) != (first.dtype, first.shape):
            raise SizeMismatch(f"the sums of leaves differ: {term.dtype}{term.shape} and {first.dtype}{first.shape}")
    return tuple(terms)


@lru_cache(maxsize=64)
def _are_whole(nodes: _Nodes, leaves: int) -> bool:
    """Returns True if the nodes are the whole tree, each leaf once."""
    return joined((node for of_rank in nodes for node in of_rank), leaves) == ((0, leaves),)


class _ReductionPlan(NamedTuple):
    """A cached plan of an all_reduce or reduce_scatter of a given dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    reduce: Reduction
    how: Arithmetic
    signature: bytes
    program: Program


def _plan(engine: Engine, key: _Key, x: Array) -> _ReductionPlan:
    """Returns the plan of an operation, made once, because training repeats a few operations."""
    collective, op, _, shape, order, leaves, nodes, detail, choose = key
    mesh, dtype = engine.mesh, native(x.dtype)
    reduce = reduction(op, dtype)
    if collective == "reduce_scatter":
        shape = _part(x, mesh.rank, mesh.size)
    # Earlier releases used this word for the leaves: all members compare it.
    words = f"op={op}{_order(order)}{f' parts={leaves}' if leaves else ''}{_held(nodes)}{detail}"
    signature = engine.sign(collective, words, dtype, x.shape).encode()
    choice = choose(collective, x.nbytes, mesh.size, sums=_sums(reduce, order), nodes=engine.nodes)
    how = _arithmetic(reduce, mesh.size, order, leaves, nodes)
    most = max(how.terms_of(rank) for rank in range(mesh.size))  # they share a frame
    at = choice.schedule, mesh.rank, mesh.size, x.size, max(1, segment(dtype, engine) // most)
    program = all_reduce_program(*at, engine.nodes) if collective == "all_reduce" else reduce_scatter_program(*at)
    if len(engine.plans) >= _MOST_PLANS:
        engine.plans.clear()
    plan = engine.plans[key] = _ReductionPlan(dtype, shape, reduce, how, signature, program)
    return plan


def _part(x: Array, rank: int, world: int) -> tuple[int, ...]:
    """Returns the shape of one of W equal parts of axis 0; raises SizeMismatch if it has none."""
    if world == 1:
        return x.shape
    if x.ndim == 0 or x.shape[0] % world:
        text = f"reduce_scatter needs {world} equal parts: axis 0 of shape {x.shape} at rank {rank} has none"
        raise SizeMismatch(text)
    return (x.shape[0] // world, *x.shape[1:])


def reduce_task(
    engine: Engine, x: Array, op: str, root: int, out: Array | None, choose: Chooser, order: str = "fastest"
) -> Task[Array | None]:
    """Makes the task of `Group.reduce`."""
    mesh, dtype = engine.mesh, native(x.dtype)
    op = name_of_op(op)
    reduce = reduction(op, dtype)
    signature = engine.sign("reduce", f"op={op} root={root}{_order(order)}", dtype, x.shape).encode()
    at_root = mesh.rank == root
    if out is not None and at_root:
        check_out(out, dtype, x.shape)
    choice = choose("reduce", x.nbytes, mesh.size, sums=_sums(reduce, order), nodes=engine.nodes)
    program = reduce_program(choice.schedule, mesh.rank, mesh.size, root, x.size, segment(dtype, engine))

    def body(call: CollectiveCall) -> Array | None:
        result = landing(out, x, dtype, x.shape, in_place=True) if at_root else np.empty(0, dtype)
        _reduce(engine, call, program, x, result, _arithmetic(reduce, mesh.size, order))
        return deliver(result, out) if at_root else None

    return Task(signature, body)


def _arithmetic(
    reduce: Reduction,
    world: int,
    order: str,
    leaves: int = 0,
    nodes: _Nodes | None = None,
    divisor: float | None = None,
) -> Arithmetic:
    if order == "tree":
        leaves = leaves or world
        return tree_arithmetic(reduce, nodes or subtrees_by_rank(world, leaves), leaves, divisor)
    return arithmetic(reduce, world, divisor)


def _held(nodes: _Nodes | None) -> str:
    """Returns the words for nodes that are no ranges: a checksum, since there may be many."""
    return "" if nodes is None else f" nodes={zlib.crc32(repr(nodes).encode()):08x}"


def _reduce(
    engine: Engine,
    call: CollectiveCall,
    program: Program,
    x: Array,
    result: Array,
    how: Arithmetic,
    terms: Sequence[Array] = (),
) -> None:
    flat = result.reshape(-1)
    base = flat if x is result else as_flat(x)
    if base is not flat and np.may_share_memory(base, flat):
        base = flat
    engine.run(call, program, base, flat, how, terms=terms)
    if engine.mesh.size == 1:  # no move finishes the total if there is nothing to add
        how.finish(flat)


def _sums(reduce: Reduction, order: str) -> SumRule:
    return reduce.sums if order == "fastest" else SumRule.IN_RANK_ORDER


def _divided(op: str, x: Array) -> str:
    if op != "sum" or x.dtype.kind not in "fcV":
        raise UnsupportedOp(f"a divisor is for sums of floats and complex numbers, not for {op!r} of {x.dtype}")
    return " divided=yes"


def _order(order: str) -> str:
    if order not in ORDERS:
        raise UnsupportedOp(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    return "" if order == "fastest" else f" order={order}"


def broadcast_task(
    engine: Engine, x: Array | None, root: int, out: Array | None, choose: Chooser, kind: str = "broadcast"
) -> Task[Array]:
    """Makes the task of `Group.broadcast`; `kind` is its name in the signature."""
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

    def body(call: CollectiveCall) -> Array:
        result = landing(out, x if mesh.rank == root else None, dtype, shape, in_place=True)
        flat = result.reshape(-1)
        base = flat if mesh.rank != root or x is None or np.may_share_memory(x, result) else as_flat(x)
        engine.run(call, plan, base, flat)
        return deliver(result, out)

    return Task(signature, body)


def scatter_task(
    engine: Engine, xs: Sequence[npt.ArrayLike] | Array | None, root: int, out: Array | None
) -> Task[Array]:
    """Makes the task of `Group.scatter`."""
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

    def body(call: CollectiveCall) -> Array:
        result = landing(out, whole, dtype, shape)
        flat = result.reshape(-1)
        engine.run(call, plan, flat if whole is None else as_flat(whole), flat)
        return deliver(result, out)

    return Task(signature, body)


def shift_task(engine: Engine, x: Array, to: int, source: int, out: Array | None, detail: str = "") -> Task[Array]:
    """Makes the task of `Group.shift`; ranks must also agree on `detail`."""
    dtype = native(x.dtype)
    if out is not None:
        check_out(out, dtype, x.shape)
    program = shift_program(to, source, x.size, segment(dtype, engine))

    def body(call: CollectiveCall) -> Array:
        result = landing(out, x, dtype, x.shape)
        if to == engine.mesh.rank:
            result[...] = x
        else:
            engine.run(call, program, as_flat(x), result.reshape(-1))
        return deliver(result, out)

    return Task(engine.sign("shift", detail.strip(), dtype, x.shape).encode(), body)


def _receive_unknown(
    engine: Engine, kind: str, root: int, source: int, program: Callable[[int, np.dtype[Any]], Program]
) -> Task[Array]:
    """Makes the task of a receiver that learns dtype and shape from the first frame."""
    asked = engine.sign(kind, f"root={root}")

    def body(call: CollectiveCall) -> Array:
        first, dtype, shape = engine.first_frame(call, source, asked)
        try:
            result = new_array(shape, dtype)
        except LimitExceeded as error:
            engine.disagree(call, source, f"announces an impossible array: {error}")
        flat = result.reshape(-1)
        told = CollectiveCall(call.operation, first.signature, call.started, call.deadline)
        engine.run(told, program(flat.size, flat.dtype), flat, flat, first=first)
        return result

    return Task(asked.encode(), body)


def _whole(xs: Sequence[npt.ArrayLike] | Array | None, world: int, root: int) -> Array:
    """Returns the root's parts as one array, shape [W, ...]."""
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
