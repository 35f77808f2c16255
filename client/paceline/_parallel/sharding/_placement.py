"""Decides which rank holds which elements of a sharded model. Pure.

A strategy decides which ranks share one copy of the model (`place`). A `FlatLayout` cuts the parameters of a unit for
these ranks: the parameters lie side by side in one array of W * S elements, in their order, with zeros at the end, and
rank r holds elements r * S to (r + 1) * S. So one collective moves all parameters, any size fits any world, and a
gathered array is used without a copy: each parameter is a view of it.

There are W ranks, N elements in all, S elements in a shard, and P parameters.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; Zhao et
al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import prod
from operator import index
from typing import NamedTuple

from paceline._links.base import Peer
from paceline.errors import InvalidWorldSize


class ShardingStrategy(Enum):
    """Names the parts of the training state that are sharded over the ranks. All strategies train the same model."""

    FULL_SHARD = "full_shard"
    """Shards parameters, gradients and optimizer state (ZeRO-3). A unit's parameters are whole only while it runs."""
    SHARD_GRAD_OP = "shard_grad_op"
    """Shards gradients and optimizer state (ZeRO-2). Parameters stay whole, and every forward pass gathers them again.
    Other ranks see an update only then; an update between forward and backward mixes old and new values."""
    NO_SHARD = "no_shard"
    """Shards nothing, like DDP."""
    HYBRID_SHARD = "hybrid_shard"
    """Does FULL_SHARD inside each node, and keeps replicas across the nodes."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The shard that this rank holds, and the ranks that hold the rest.

    Attributes:
        shards: the ranks, including this one, that hold one copy between them, in the order of the shards.
        replicas: the ranks, including this one, that hold the same shard.
        shard: index of this rank in `shards`.
        nodes: for each copy of the model the ranks that hold it; the same on all ranks.
        keeps_full: whether parameters stay whole between the passes.
    """

    shards: tuple[int, ...]
    replicas: tuple[int, ...]
    shard: int
    nodes: tuple[tuple[int, ...], ...]
    keeps_full: bool


def place(strategy: ShardingStrategy, rank: int, members: Sequence[Peer], intra_node_size: int | None) -> Placement:
    """Returns what a rank holds under a strategy.

    `members` are in rank order; none for a candidate, which holds everything. For HYBRID_SHARD, ranks n * size to (n +
    1) * size - 1 are a node. Without a size, ranks that can share memory are a node (`Peer.node`), or ranks of one host
    name if that is not known.
    """
    world = len(members)
    if strategy is not ShardingStrategy.HYBRID_SHARD and intra_node_size is not None:
        raise ValueError(f"intra_node_size is for HYBRID_SHARD, not for {strategy.name}")
    if not members:
        return Placement((rank,), (rank,), 0, (), keeps_full=True)
    if strategy is ShardingStrategy.HYBRID_SHARD:
        nodes = _as_they_share_memory(members) if intra_node_size is None else _blocks(world, intra_node_size)
    else:
        nodes = _blocks(world, 1 if strategy is ShardingStrategy.NO_SHARD else world)
    node = next(node for node in nodes if rank in node)
    shard = node.index(rank)
    keeps_full = strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    return Placement(node, tuple(other[shard] for other in nodes), shard, nodes, keeps_full)


def _blocks(world: int, size: int) -> tuple[tuple[int, ...], ...]:
    size = index(size)
    if size < 1 or world % size:
        raise InvalidWorldSize(
            f"HYBRID_SHARD: world_size={world} must be a positive multiple of intra_node_size={size}; if workers "
            "may come and go (max_workers above min_workers), session.steps trains with the largest available multiple"
        )
    return tuple(tuple(range(start, start + size)) for start in range(0, world, size))


def _as_they_share_memory(members: Sequence[Peer]) -> tuple[tuple[int, ...], ...]:
    nodes: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        nodes.setdefault(member.node or member.host, []).append(rank)
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        counts = ", ".join(f"{members[ranks[0]].host}: {len(ranks)}" for ranks in nodes.values())
        raise InvalidWorldSize(
            f"HYBRID_SHARD needs the same number of ranks on each host, but there are {counts}. Set intra_node_size= "
            "to divide the ranks otherwise"
        )
    return tuple(tuple(ranks) for ranks in nodes.values())


class CopyPartners(NamedTuple):
    """The ranks with which a rank exchanges gradients for one of its copies."""

    to: int
    """The rank that has a copy of this rank's shard."""
    source: int
    """The rank of whose shard this rank has a copy."""


def copy_partners(rank: int, members: Sequence[Peer], redundancy: int) -> list[CopyPartners]:
    """Returns the partners for each copy that a rank has, if `redundancy` ranks hold each shard.

    A shard and its copies are on ranks one after the other, so that little has to move when the world changes, if these
    are on different machines or all ranks are on one. Else the ranks form a circle in the order of their machines, in
    which a shard and its copies are W // redundancy seats apart: on different machines, unless one has more than W //
    redundancy ranks. Every rank has equally many copies.
    """
    world = len(members)
    redundancy = min(redundancy, world)
    # Containers of one machine share no memory, so they are nodes of their own, but they end with it.
    machines = [peer.node.partition("/")[0] or peer.host for peer in members]
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    circle, apart = list(range(world)), 1
    neighbours = [{machines[(first + n) % world] for n in range(redundancy)} for first in range(world)]
    if min(map(len, neighbours)) < min(redundancy, len(numbers)):
        circle.sort(key=lambda member: numbers[machines[member]])
        apart = world // redundancy
    here = circle.index(rank)
    return [
        CopyPartners(circle[(here + n * apart) % world], circle[(here - n * apart) % world])
        for n in range(1, redundancy)
    ]


class FlatLayout:
    """The places of a unit's parameters in its flat array.

    Attributes:
        size: N.
        shard_size: S, the smallest for which W * S >= N.
        places: each parameter's place in the flat array.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], world: int) -> None:
        sizes = [prod(shape) for shape in shapes]
        ends = list(accumulate(sizes))
        self.world = world
        self.size = sum(sizes)
        self.shard_size = -(-self.size // world)
        self.places = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    @property
    def padded(self) -> int:
        """The number of elements with padding, W * S."""
        return self.world * self.shard_size

    def own(self, rank: int) -> slice:
        """Returns the place of a rank's shard in the flat array."""
        return slice(rank * self.shard_size, (rank + 1) * self.shard_size)

    def pieces(self, rank: int) -> list[slice]:
        """Returns each parameter's place within a rank's shard; empty if the rank has no elements of it."""
        start, end = rank * self.shard_size, (rank + 1) * self.shard_size
        clipped = [(min(max(p.start, start), end), min(max(p.stop, start), end)) for p in self.places]
        return [slice(lo - start, hi - start) for lo, hi in clipped]

    def starts(self, rank: int) -> list[int]:
        """Returns for each parameter the index of its first element that the rank has."""
        return [
            piece.start + rank * self.shard_size - place.start if piece.stop > piece.start else 0
            for piece, place in zip(self.pieces(rank), self.places, strict=True)
        ]
