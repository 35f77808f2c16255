"""What wrappers ask of a group, as protocols of a few members, so that they can be read and tested without links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.collectives.piggyback import Piggyback
from paceline.compression import Codec, Memory
from paceline.links.base import Peer

__all__ = ["PendingWork", "Ranks", "ShardRanks"]


class PendingWork(Protocol):
    """A collective under way (`paceline.Work`)."""

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until it is complete and returns its result."""

    def done(self) -> bool:
        """True once it has ended, well or not: then nobody touches its arrays."""


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
    def members(self) -> Sequence[Peer]:
        """The members in rank order."""

    @property
    def has_same_state(self) -> bool:
        """True if all members are known to hold the same state."""

    @property
    def share(self) -> float:
        """What this rank's gradients count now, beside the other ranks'."""

    @property
    def ban_reason(self) -> str:
        """Why no collective may be called now; empty if any may."""

    def take_piggyback(self) -> Piggyback | None:
        """Whoever waits for a bucket of gradients to ride in; all ranks have one or none. Given out once."""

    def all_reduce(
        self, x: Any, *, op: Any = "sum", out: Any = None, divisor: Any = None, async_op: Any = False
    ) -> Any:
        """The same bits on every rank, in `out` where given; a `PendingWork` if asynchronous.

        `divisor` gives what the sum is divided by, once those before it are complete.
        """

    def all_reduce_compressed(
        self, x: Any, codec: Codec, *, exact: int = 0, memory: Memory | None = None, out: Any = None, async_op: Any
    ) -> Any:
        """The same with a codec between the ranks; the last `exact` elements as they are."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        """A new array that links can use without a copy."""

    def broadcast(self, x: Any, *, root: int = 0, out: Any = None) -> Any:
        """The root's array, on every rank; in `out` where given."""


class ShardRanks(Ranks, Protocol):
    """The part of `paceline.Group` that FSDP uses on top."""

    @property
    def generation(self) -> int:
        """The generation whose members these are."""

    @property
    def is_elastic(self) -> bool:
        """True if there may be more or fewer members in another view."""

    @property
    def most_members(self) -> int:
        """So many members any view has at most."""

    def all_reduce(
        self,
        x: Any,
        *,
        op: Any = "sum",
        order: Any = "fastest",
        out: Any = None,
        label: Any = "",
        divisor: Any = None,
        async_op: Any = False,
    ) -> Any:
        """As above; `order="rank"` adds up in rank order, 16-bit values in float32; ranks must agree on the label."""

    def all_gather(self, x: Any, *, out: Any = None, label: Any = "", async_op: Any = False) -> Any:
        """The arrays of all ranks, joined on axis 0, in `out`; a `PendingWork` if asynchronous."""

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: Any = "sum",
        order: Any = "fastest",
        out: Any = None,
        label: Any = "",
        divisor: Any = None,
        async_op: Any = False,
    ) -> Any:
        """The r-th of W equal parts of the reduced array at rank r; otherwise as `all_gather`."""

    def subgroup(self, members: Sequence[int], *, name: str = "") -> ShardRanks:
        """A part of the group."""
