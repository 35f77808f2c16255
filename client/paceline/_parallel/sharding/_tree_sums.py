"""Sums the gradients of a step's microbatches for FSDP, in a fixed tree (`sum_tree`; docs/decisions/17).

`TreeSums` adds up the leaves that this rank has finished. `TreeScattering` sums what the ranks have over the ranks, so
that each gets its shard. Letters: V leaves, W ranks, n of them in a node, R nodes, S elements in a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._base.sum_order import Node
from paceline._base.work import Work
from paceline._microbatch.sum_tree import closes, joined
from paceline._parallel.sharding._flat import Flat
from paceline._parallel.sharding._unit import Unit
from paceline.errors import UnsupportedOp


class TreeSums:
    """Arrays of adjacent nodes of the tree, added up as far as the tree allows: a binary counter."""

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._waiting: list[tuple[Node, NDArray[Any]]] = []

    def add(self, node: Node, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Adds the sum of the next node from the left; the array is written to. Returns arrays that are free now."""
        free = []
        with np.errstate(all="ignore"):  # infinities are valid here
            while self._waiting and closes(self._waiting[-1][0], node, self._leaves):
                (lo, _), left = self._waiting.pop()
                np.add(left, array, out=array)
                node = (lo, node[1])
                free.append(left)
        self._waiting.append((node, array))
        return free

    @property
    def terms(self) -> list[NDArray[Any]]:
        """The sums of the maximal subtrees of the nodes, from left to right."""
        return [array for _, array in self._waiting]


class TreeScattering:
    """Sums the gradients of one flat array over all microbatches of a step; each rank gets the shard that it keeps.

    Under HYBRID_SHARD the leaves of a node are adjacent, since its ranks' leaves are. Its ranks exchange their
    subtrees, so that the owner of a shard can add them up to the maximal subtrees of the node; these are summed over
    the nodes. Ranks begin their collectives as in `Scattering`.

    Args:
        terms: this rank's whole gradients, shape [n S]: the sums of its maximal subtrees.
        used: for each parameter, whether it had a gradient in any of this rank's leaves.
        leaves: V, the leaves of the tree.
        nodes: the maximal subtrees of each rank.
        divisor: returns the total weight while gradients are summed.
    """

    def __init__(
        self,
        unit: Unit,
        flat: Flat,
        terms: Sequence[NDArray[Any]],
        used: Sequence[bool],
        leaves: int,
        nodes: tuple[tuple[Node, ...], ...],
        divisor: Callable[[], float],
    ) -> None:
        self.flat = flat
        self.used = used
        self._unit = unit
        self._leaves = leaves
        self._nodes = nodes
        self._divisor = divisor
        self._divides = True
        self._terms = terms
        self._shard = terms[-1]
        self._exchange: Work[Any] | None = None
        self._last: Any = None
        if unit.shards is None:
            self._divides = self._sum_over_nodes()
        elif not flat.is_spread:  # it has no elements
            self._divides = False
        elif unit.replicas is None:
            self._last = unit.shards._core.reduce_scatter_tree(
                terms, leaves=leaves, nodes=nodes, label=flat.label, divisor=divisor, async_op=True
            )
        else:
            size = flat.layout.shard_size
            counts = [len(nodes[rank]) * size for rank in unit.placement.shards]
            sent = terms[0] if len(terms) == 1 else np.stack([t.reshape(-1, size) for t in terms], 1).reshape(-1)
            self._exchange = unit.shards.all_to_all(
                sent,
                send_counts=[len(terms) * size] * len(counts),
                recv_counts=counts,
                out=unit.shards.empty(sum(counts), sent.dtype),
                async_op=True,
            )

    def advance(self) -> None:
        """Waits for the exchange within the node, and begins the sum over the nodes; does nothing if it has begun."""
        if self._exchange is None:
            return
        received, self._exchange = self._exchange.wait(), None
        nodes = [node for rank in self._unit.placement.shards for node in self._nodes[rank]]
        sums = TreeSums(self._leaves)
        for node, array in zip(nodes, received.reshape(len(nodes), -1), strict=True):
            sums.add(node, array)
        self._terms = sums.terms
        self._sum_over_nodes()

    def finish(self, total: float, used: NDArray[np.bool_]) -> None:
        """Waits for the sums, and gives the pieces their gradients; arguments as for `Scattering.finish`."""
        self.advance()
        if self._last is not None:
            self._shard = self._last.wait()
        if not self._divides and total != 1:  # a division by 1 changes no bit
            np.divide(self._shard, total, out=self._shard)
        self.flat.put_gradients(self._shard, used)

    def _sum_over_nodes(self) -> bool:
        """Begins the sum over the ranks that hold the same shard; returns False if there is no other."""
        if self._unit.replicas is None:
            return False
        self._last = self._unit.replicas._core.all_reduce_tree(
            self._terms,
            leaves=self._leaves,
            nodes=_joined_by_copy(self._nodes, self._unit.placement.nodes, self._leaves),
            out=self._terms[-1],
            label=self.flat.label,
            divisor=self._divisor,
            async_op=True,
        )
        return True


def check_placement(units: Sequence[Unit], world: int) -> None:
    """Checks that the sums of microbatches do not depend on the world under the placement of these units."""
    for unit in units:
        if any(flat.rounds_on_the_way for flat in unit.flats):
            raise UnsupportedOp(
                "communication_dtype rounds values that travel, and a single worker sends none, so the bits would "
                "depend on the number of workers: leave it out, or the microbatches of the sampler"
            )
        ranks = [rank for node in unit.placement.nodes for rank in node]
        if ranks != list(range(world)):
            raise UnsupportedOp(
                f"the nodes {unit.placement.nodes} do not have adjacent ranks, so the microbatches of a node are no "
                "range: give HYBRID_SHARD intra_node_size="
            )


@lru_cache(maxsize=64)
def _joined_by_copy(
    nodes: tuple[tuple[Node, ...], ...], copies: tuple[tuple[int, ...], ...], leaves: int
) -> tuple[tuple[Node, ...], ...]:
    """Returns the maximal subtrees of each copy of the model, which the ranks of the copy have between them."""
    return tuple(joined((node for rank in ranks for node in nodes[rank]), leaves) for ranks in copies)
