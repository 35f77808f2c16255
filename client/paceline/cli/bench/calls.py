"""Each collective as one call on a group, its arrays made beforehand. W is the world size, N the size's elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.arrays import Array
from paceline.cli.bench.sizes import ELEMENT_BYTES
from paceline.group import Group

__all__ = ["SEPARATE", "make_call"]

SEPARATE = frozenset({"reduce", "broadcast", "scatter", "gather", "send_recv"})
"""Collectives that some rank can leave before another has come: calls in a row would run into each other."""

_ROOT = 0


def make_call(group: Group, collective: str, size: int) -> Callable[[], object]:
    """What makes one call of a collective and returns this rank's result, in the same array each time.

    Rank r gives elements of value r + 1.

    Args:
        group: the group.
        collective: as its methods spell it; or "send_recv": to the next rank, and from the one before.
        size: bytes of the whole array, see `measured_size`.
    """
    world, at_root = group.size, group.rank == _ROOT
    n = size // ELEMENT_BYTES
    part = n // world

    def full(n: int) -> Array:
        return np.full(n, group.rank + 1, np.float32)

    match collective:
        case "all_reduce":
            x, out = full(n), group.empty(n)
            return lambda: group.all_reduce(x, out=out)
        case "reduce":
            x, at = full(n), group.empty(n) if at_root else None
            return lambda: group.reduce(x, root=_ROOT, out=at)
        case "reduce_scatter":
            x, out = full(n), group.empty(part)
            return lambda: group.reduce_scatter(x, out=out)
        case "broadcast":
            x, out = full(n), group.empty(n)
            return lambda: group.broadcast(x, root=_ROOT, out=out)
        case "scatter":
            xs, out = full(n).reshape(world, part) if at_root else None, group.empty(part)
            return lambda: group.scatter(xs, root=_ROOT, out=out)
        case "all_gather":
            x, out = full(part), group.empty(n)
            return lambda: group.all_gather(x, out=out)
        case "gather":
            x, at = full(part), group.empty(n) if at_root else None
            return lambda: group.gather(x, root=_ROOT, out=at)
        case "all_to_all":
            x, out = full(n), group.empty(n)
            return lambda: group.all_to_all(x, out=out)
        case "send_recv":
            x, out = full(n), group.empty(n)
            return lambda: _shift(group, x, out)
        case "barrier":
            return group.barrier
    raise ValueError(f"no such collective: {collective}")


def _shift(group: Group, x: Array, out: Array) -> Array:
    group.send(x, (group.rank + 1) % group.size)
    return group.recv((group.rank - 1) % group.size, out=out)[0]
