"""Who moves arrays between ranks, as the data-parallel core sees it: the part of `paceline.Group` that it uses.

Another engine that moves host arrays can stand here; tests put recording groups here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline._collectives.piggyback import Piggyback
from paceline._links.base import Peer
from paceline.compression import Codec, Memory

__all__ = ["PendingWork", "RankGroup", "ShardRankGroup"]


class PendingWork(Protocol):
    """A collective under way (`paceline.Work`)."""

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until it is complete and returns its result."""

    def done(self) -> bool:
        """True once it has ended, well or not: nothing touches its arrays any more."""


class RankGroup(Protocol):
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
    def gradient_weight(self) -> float:
        """The weight of this rank's gradients now, beside the other ranks'."""

    @property
    def ban_reason(self) -> str:
        """Why no collective may be called now; empty if any may."""

    def take_piggyback(self) -> Piggyback | None:
        """Returns, once, the numbers that wait to travel with gradients; all ranks have some, or none has."""

    def all_reduce(
        self, x: Any, *, op: Any = "sum", out: Any = None, divisor: Any = None, async_op: Any = False
    ) -> Any:
        """Reduces to the same bits on every rank, in `out` if given; returns a `PendingWork` if asynchronous.

        `divisor` gives what the sum is divided by; it is called once the collectives before are complete.
        """

    def all_reduce_compressed(
        self, x: Any, codec: Codec, *, exact: int = 0, memory: Memory | None = None, out: Any = None, async_op: Any
    ) -> Any:
        """As `all_reduce`, with a codec between the ranks; the last `exact` elements travel as they are."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Allocates an array that links can use without a copy."""

    def broadcast(self, x: Any, *, root: int = 0, out: Any = None) -> Any:
        """Returns the root's array on every rank; in `out` if given."""


class ShardRankGroup(RankGroup, Protocol):
    """The part of `paceline.Group` that FSDP uses."""

    @property
    def generation(self) -> int:
        """The generation whose members these are."""

    @property
    def is_elastic(self) -> bool:
        """True if there may be more or fewer members in another view."""

    @property
    def most_members(self) -> int:
        """The most members that any view can have."""

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
        """As in `RankGroup`; `order="rank"` sums in rank order, 16-bit values in float32; labels must be the same."""

    def all_gather(self, x: Any, *, out: Any = None, label: Any = "", async_op: Any = False) -> Any:
        """Joins the arrays of all ranks on axis 0, in `out`; returns a `PendingWork` if asynchronous."""

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
        """Gives rank r the r-th of W equal parts of the reduced array; otherwise as `all_gather`."""

    def subgroup(self, members: Sequence[int], *, name: str = "") -> ShardRankGroup:
        """Returns a group of these members."""
