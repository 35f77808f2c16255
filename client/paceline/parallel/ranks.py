"""What wrappers ask of a group: a protocol of four members, so that they can be read and tested without links."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["PendingWork", "Ranks"]


class PendingWork(Protocol):
    """A collective under way (`paceline.Work`)."""

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until it is complete and returns its result."""


class Ranks(Protocol):
    """The part of `paceline.Group` that DDP uses."""

    @property
    def rank(self) -> int:
        """This member's rank."""

    @property
    def size(self) -> int:
        """W, the number of members."""

    def all_reduce(self, x: Any, *, op: Any = "sum", out: Any = None, async_op: Any = False) -> Any:
        """The same bits on every rank, in `out` where given; a `PendingWork` if asynchronous."""

    def broadcast(self, x: Any, *, root: int = 0, out: Any = None) -> Any:
        """The root's array, on every rank; in `out` where given."""
