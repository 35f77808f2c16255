"""Which members share a node: as the view says it, so that all members see the same."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.collectives.rows import Nodes
from paceline.links.base import Peer

__all__ = ["nodes_of"]


def nodes_of(peers: Sequence[Peer]) -> Nodes:
    """The number of each member's node. One that shares memory with nobody is on a node of its own."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(peer.node or f" {rank}", len(numbers)) for rank, peer in enumerate(peers))
