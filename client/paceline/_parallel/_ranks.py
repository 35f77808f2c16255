"""The part of `paceline.Group` that the data-parallel core uses to move arrays between ranks.

Another object that moves host arrays can take its place; tests use recording groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline._base.sum_order import SumOrder
from paceline._group.group_core import Piggyback
from paceline._links.base import Peer
from paceline.compression import Codec, Memory


class PendingWork(Protocol):
    """A collective under way (`paceline.Work`)."""

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the collective is complete and returns its result."""

    def done(self) -> bool:
        """Returns True once the collective has succeeded or failed: nothing touches its arrays any more."""


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
        """The number of the generation that these members form."""

    @property
    def members(self) -> Sequence[Peer]:
        """The members in rank order."""

    @property
    def has_same_state(self) -> bool:
        """True if all members are known to hold the same state."""

    @property
    def engine_name(self) -> str:
        """The word "links", or the name of the engine that carries gradients; the group is then a `CarryingGroup`."""

    @property
    def gradient_weight(self) -> float:
        """The present weight of this rank's gradients, relative to the other ranks'."""

    @property
    def order(self) -> SumOrder:
        """The order in which gradients are summed over the ranks at present."""

    @property
    def ban_reason(self) -> str:
        """The reason why no collective may be called now; empty if collectives may be called."""

    def take_piggyback(self) -> Piggyback | None:
        """Returns, once, the numbers that wait to travel with gradients; either all ranks have some or none has."""

    def all_reduce(
        self, x: Any, *, op: Any = "sum", out: Any = None, divisor: Any = None, async_op: Any = False
    ) -> Any:
        """Reduces to the same bits on every rank, in `out` if given; returns a `PendingWork` if asynchronous.

        `divisor` returns the number to divide the sum by; it is called once the collectives before are complete.
        """

    def all_reduce_tree(
        self,
        terms: Any,
        *,
        leaves: int,
        out: Any,
        nodes: Any = None,
        label: Any = "",
        divisor: Any = None,
        async_op: Any = False,
    ) -> Any:
        """Sums the leaves of one fixed tree, of which `terms` are this rank's subtrees; see `all_reduce`.

        With `nodes` they are the sums of other nodes, given for each rank.
        """

    def all_reduce_compressed(
        self, x: Any, codec: Codec, *, exact: int = 0, memory: Memory | None = None, out: Any = None, async_op: Any
    ) -> Any:
        """Does `all_reduce` with a codec between the ranks; the last `exact` elements travel uncompressed."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Allocates an array that links can use without a copy."""

    def broadcast(self, x: Any, *, root: int = 0, out: Any = None) -> Any:
        """Returns the root's array on every rank; in `out` if given."""


class CarryingGroup(RankGroup, Protocol):
    """The part of `paceline.Group` that DDP uses if an engine carries gradients."""

    def open_engine(self) -> Any:
        """Begins to open the engine of this generation; a collective."""

    def all_reduce_carried(self, x: Any, tail: Any, *, divisor: Any = None, async_op: Any = False) -> Any:
        """Sums `x` by the engine and `tail` over links, in place; returns a `PendingWork` if asynchronous."""


class ShardRankGroup(RankGroup, Protocol):
    """The part of `paceline.Group` that FSDP uses."""

    @property
    def generation(self) -> int:
        """The number of the generation that these members form."""

    @property
    def is_elastic(self) -> bool:
        """True if another view may have more or fewer members."""

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
        """See `RankGroup`; `order="rank"` sums in rank order, 16-bit values in float32; labels must be equal."""

    def all_gather(
        self, x: Any, *, uneven: Any = False, out: Any = None, label: Any = "", async_op: Any = False
    ) -> Any:
        """Joins the arrays of all ranks on axis 0, in `out`; returns a `PendingWork` if asynchronous.

        With `uneven` their lengths may differ.
        """

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
        """Gives rank r the r-th of W equal parts of the reduced array; otherwise like `all_gather`."""

    def reduce_scatter_tree(
        self, terms: Any, *, leaves: int, label: Any = "", divisor: Any = None, async_op: Any = False
    ) -> Any:
        """Sums the leaves of one fixed tree, like `all_reduce_tree`, and gives rank r the r-th of W pieces."""

    def all_to_all(
        self, x: Any, *, send_counts: Any = None, recv_counts: Any = None, out: Any = None, async_op: Any = False
    ) -> Any:
        """Sends a part of axis 0 to each rank, and joins those of all ranks; otherwise like `all_gather`."""

    def subgroup(self, members: Sequence[int], *, name: str = "") -> ShardRankGroup:
        """Returns a group of these members."""
