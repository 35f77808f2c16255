"""The options that the overloads of collectives share: typing only, so that each overload names them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypedDict

from paceline._base.arrays import Array
from paceline.compression import Memory

Op: TypeAlias = Literal["sum", "mean", "avg", "prod", "min", "max", "band", "bor", "bxor"]
"""The ops that `_collectives/arithmetic.py` knows."""

Order: TypeAlias = Literal["fastest", "rank", "tree"]
"""The orders in which a total may be summed; see `Collectives`."""


class Options(TypedDict, total=False):
    """Options that the overloads of every collective of arrays take."""

    out: Array | None
    timeout: float | None


class RootedOptions(Options, total=False):
    root: int


class ReduceOptions(RootedOptions, total=False):
    op: Op
    order: Order


class AllReduceOptions(Options, total=False):
    op: Op
    order: Order
    label: str
    divisor: Callable[[], float] | None


class CompressedOptions(Options, total=False):
    op: Op
    exact: int
    memory: Memory | None
    label: str


class AllGatherOptions(Options, total=False):
    uneven: bool
    label: str


class GatherOptions(RootedOptions, total=False):
    uneven: bool


class ShiftOptions(Options, total=False):
    label: str


class AllToAllOptions(Options, total=False):
    send_counts: Sequence[int] | None
    recv_counts: Sequence[int] | None
