"""Each collective as one call on a group, its arrays made beforehand. W is the world size, N the size's elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paceline.arrays import Array
from paceline.cli.bench.sizes import ELEMENT_BYTES
from paceline.cli.bench.values import ROOT, given
from paceline.group import Group

__all__ = ["MEMORIES", "SEPARATE", "Call", "make_call"]

SEPARATE = frozenset({"reduce", "broadcast", "scatter", "gather", "send_recv"})
"""Collectives that some rank can leave before another has come: calls in a row would run into each other."""

MEMORIES = ("any", "group")
"""Whose the arrays are: any of NumPy's, or those of `Group.empty`."""


class Call(NamedTuple):
    """One collective on arrays of its own, in any implementation.

    Attributes:
        run: makes one call.
        result: where this rank's result lies afterwards; None where it gets none.
        in_place: the result of a sum replaces the argument.
    """

    run: Callable[[], object]
    result: Array | None
    in_place: bool = False


def make_call(group: Group, collective: str, size: int, memory: str = "any", place: str = "usual") -> Call:
    """What makes one call of a collective. Ranks give the values of `values.given`.

    Args:
        group: the group.
        collective: as its methods spell it; or "send_recv": to the next rank, and from the one before.
        size: bytes of the whole array, see `measured_size`.
        memory: one of `MEMORIES`.
        place: of an all_reduce's sum, one of `plan.PLACES`; usually in place. A broadcast always is.
    """
    world, at_root = group.size, group.rank == ROOT
    n = size // ELEMENT_BYTES
    part = n // world

    def empty(n: int) -> Array:
        # Written to at once: pages that nobody has touched would be made in the calls that are timed.
        return full(n, 0.0)

    def full(n: int, value: float = group.rank + 1.0) -> Array:
        array = group.empty(n) if memory == "group" else np.empty(n, np.float32)
        array[:] = value
        return array

    match collective:
        case "all_reduce" if place == "out":
            x, out = full(n), empty(n)
            return Call(lambda: group.all_reduce(x, out=out), out)
        case "all_reduce":
            x = full(n, given(group.rank, world, in_place=True))
            return Call(lambda: group.all_reduce(x, out=x), x, in_place=True)
        case "reduce":
            x, at = full(n), empty(n) if at_root else None
            return Call(lambda: group.reduce(x, root=ROOT, out=at), at)
        case "reduce_scatter":
            x, out = full(n), empty(part)
            return Call(lambda: group.reduce_scatter(x, out=out), out)
        case "broadcast":
            x = full(n)
            return Call(lambda: group.broadcast(x, root=ROOT, out=x), x)
        case "scatter":
            xs, out = full(n).reshape(world, part) if at_root else None, empty(part)
            return Call(lambda: group.scatter(xs, root=ROOT, out=out), out)
        case "all_gather":
            x, out = full(part), empty(n)
            return Call(lambda: group.all_gather(x, out=out), out)
        case "gather":
            x, at = full(part), empty(n) if at_root else None
            return Call(lambda: group.gather(x, root=ROOT, out=at), at)
        case "all_to_all":
            x, out = full(n), empty(n)
            return Call(lambda: group.all_to_all(x, out=out), out)
        case "send_recv":
            x, out = full(n), empty(n)
            return Call(lambda: _shift(group, x, out), out)
        case "barrier":
            return Call(group.barrier, None)
    raise ValueError(f"no such collective: {collective}")


def _shift(group: Group, x: Array, out: Array) -> None:
    group.send(x, (group.rank + 1) % group.size)
    group.recv((group.rank - 1) % group.size, out=out)
