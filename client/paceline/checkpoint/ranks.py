"""What sharded checkpoints ask of a group: a few members, so that they can be read and tested without links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.links.base import Peer

__all__ = ["Ranks"]


class Ranks(Protocol):
    """The part of `paceline.Group` that sharded checkpoints use."""

    @property
    def rank(self) -> int:
        """This member's rank."""

    @property
    def size(self) -> int:
        """The number of members."""

    @property
    def members(self) -> Sequence[Peer]:
        """The members in rank order."""

    def broadcast_object(self, o: Any = None, *, root: int = 0) -> Any:
        """The root's object, on every rank."""

    def gather_object(self, o: Any, *, root: int = 0) -> list[Any] | None:
        """The objects of all ranks, at the root; None elsewhere."""

    def all_gather_object(self, o: Any) -> list[Any]:
        """The objects of all ranks, on every rank."""
