"""What wrappers ask of a group, as protocols of a few members, so that they can be read and tested without links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.collectives.passenger import Passenger
from paceline.links.base import Peer

__all__ = ["PendingWork", "Ranks", "ShardRanks"]


class PendingWork(Protocol):
    """A collective under way (`paceline.Work`)."""

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until it is complete and returns its result."""


class Ranks(Protocol):
    """The part of `paceline.Group` that all wrappers use."""

    @property
    def rank(self) -> int:
        """This member's rank."""

    @property
    def size(self) -> int:
        """W, the number of members."""

    @property
    def generation(self) -> int:
        """The generation whose members these are."""

    @property
    def vouched(self) -> bool:
        """True if all members are known to hold the same state."""

    def board(self) -> Passenger | None:
        """Whoever waits for a bucket of gradients to ride in; all ranks have one or none. Given out once."""

    def all_reduce(self, x: Any, *, op: Any = "sum", out: Any = None, async_op: Any = False) -> Any:
        """The same bits on every rank, in `out` where given; a `PendingWork` if asynchronous."""

    def broadcast(self, x: Any, *, root: int = 0, out: Any = None) -> Any:
        """The root's array, on every rank; in `out` where given."""


class ShardRanks(Ranks, Protocol):
    """The part of `paceline.Group` that FSDP uses on top."""

    @property
    def generation(self) -> int:
        """The generation whose members these are."""

    @property
    def members(self) -> Sequence[Peer]:
        """The members in rank order."""

    def all_reduce(
        self,
        x: Any,
        *,
        op: Any = "sum",
        order: Any = "fastest",
        out: Any = None,
        label: Any = "",
        async_op: Any = False,
    ) -> Any:
        """As above; `order="rank"` adds up in rank order, 16-bit values in float32; ranks must agree on the label."""

    def all_gather(self, x: Any, *, out: Any = None, label: Any = "", async_op: Any = False) -> Any:
        """The arrays of all ranks, joined on axis 0, in `out`; a `PendingWork` if asynchronous."""

    def reduce_scatter(
        self, x: Any, *, op: Any = "sum", order: Any = "fastest", label: Any = "", async_op: Any = False
    ) -> Any:
        """The r-th of W equal parts of the reduced array at rank r; a `PendingWork` if asynchronous."""

    def subgroup(self, members: Sequence[int], *, name: str = "") -> ShardRanks:
        """A part of the group."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        """A new array that links can use without a copy."""
