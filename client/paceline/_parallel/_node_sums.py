"""The sums of microbatches in a bucket's memory, whatever that memory is: arrays here, tensors on a device there.

Each microbatch is a leaf of a tree. Its gradients become the sum of a node, and siblings are added up as soon as both
are there (`sum_tree`), so that a rank holds few of them.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Generic, TypeVar

from paceline._base.sum_order import EVEN, Node, SumOrder
from paceline._microbatch.sum_tree import closes

MemoryT = TypeVar("MemoryT")


class NodeSums(abc.ABC, Generic[MemoryT]):
    """The base of buckets that sum in trees.

    Attributes:
        order: the order in which `terms` are summed over the ranks (`add_leaf`); the even order sums the memory in use.
        terms: in a tree, what this rank gives, once its last leaf is there: the memory with the sums of its nodes. It
            is not written to while it is summed, so it is still there if that fails.
    """

    def __init__(self) -> None:
        self.order = EVEN
        self.terms: list[MemoryT] = []
        self._sums: list[tuple[Node, MemoryT]] = []
        """Sums of nodes, from left to right."""
        self._spare: list[MemoryT] = []

    _in_use: MemoryT
    """The memory in use, where gradients are packed."""

    @abc.abstractmethod
    def _new_memory(self) -> MemoryT:
        """Allocates memory."""

    @abc.abstractmethod
    def _use(self, memory: MemoryT) -> None:
        """Packs gradients there from now on."""

    @abc.abstractmethod
    def _offer_home(self) -> None:
        """Makes the memory in use the home of gradients that come from now on."""

    @abc.abstractmethod
    def _add_up(self, left: MemoryT, right: MemoryT, into: MemoryT) -> None:
        """Adds up two sums, into one of them."""

    @abc.abstractmethod
    def _drop_gradients(self) -> None:
        """Takes the gradients that are in the memory away from the parameters."""

    @abc.abstractmethod
    def _clear_piggyback(self, memory: MemoryT) -> None:
        """Removes the step word of an undone attempt."""

    def add_leaf(self, order: SumOrder) -> None:
        """Adds the packed gradients of a pass to others, as a leaf of the tree.

        After a rank's last leaf `terms` are ready to be summed over the ranks, into the memory in use, which is other
        memory then. After any other the gradients may be written again.
        """
        if order.leaf is not None:
            self._add(order.leaf, order.leaves)
        if not order.is_last:
            self._move()
            self._drop_gradients()
            return
        self.order = order
        self.terms = [sums for _, sums in self._sums] or [self._in_use]
        if len(order.nodes) == 1:  # nothing travels: the sum of all leaves is divided where it lies
            ((_, whole),) = self._sums
            if whole is not self._in_use:
                self._spare.append(self._in_use)
                self._use(whole)
                self._offer_home()
            self._sums.clear()
        elif order.leaf is not None:
            self._move()

    def _add(self, node: Node, leaves: int) -> None:
        """Takes the memory in use as the sum of a node, and adds up siblings."""
        place = sum(other < node for other, _ in self._sums)
        while True:
            if place and closes(self._sums[place - 1][0], node, leaves):
                place -= 1
                left, sums = self._sums.pop(place)
                self._add_up(sums, self._in_use, into=self._in_use)
                node = (left[0], node[1])
            elif place < len(self._sums) and closes(node, self._sums[place][0], leaves):
                right, sums = self._sums.pop(place)
                self._add_up(self._in_use, sums, into=self._in_use)
                node = (node[0], right[1])
            else:
                break
            self._spare.append(sums)
        self._sums.insert(place, (node, self._in_use))

    def _move(self) -> None:
        """Uses other memory from now on: nothing is copied, and gradients that are there now stay where they are."""
        self._use(self._spare.pop() if self._spare else self._new_memory())
        self._offer_home()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes whose sums the bucket holds, from left to right."""
        return tuple(node for node, _ in self._sums)

    def keep_nodes(self, nodes: Sequence[Node], *, spare: int) -> None:
        """See `GradientBucket`."""
        self._spare += [sums for node, sums in self._sums if node not in nodes]
        self._sums = [(node, sums) for node, sums in self._sums if node in nodes]
        for _, sums in self._sums:
            self._clear_piggyback(sums)
        if not nodes:  # a repair takes more memory than other steps
            del self._spare[spare:]
        self.order, self.terms = EVEN, []

    def _forget_sums(self) -> None:
        """Lets go of all memory but the one in use, because an abandoned collective may still read and write it."""
        self._sums.clear()
        self._spare.clear()
