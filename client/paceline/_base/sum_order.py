"""The order in which gradients are summed over the ranks: all that groups, wrappers and reducers know of microbatches.

A group holds one (`GroupCore.order`). It is `EVEN`, but in a step with microbatches a `MicrobatchTurn`
(`_microbatch.attempt`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

from paceline.errors import PacelineError

Node: TypeAlias = tuple[int, int]
"""The leaves lo to hi - 1 of a tree over microbatches, as (lo, hi)."""

_NOTHING = nullcontext()


class SumsHolder(Protocol):
    """A wrapper, as far as it holds sums of microbatches."""

    def held_sums(self) -> tuple[object, tuple[Node, ...]] | None:
        """Returns the label under which it has got or kept sums (`SumOrder.label`), and their nodes, left to right.

        None if it holds no sums, or cannot keep them.
        """

    def recover_sums(self) -> None:
        """Takes back memory that an abandoned collective has used; forgets sums that one may still read."""


class SumsNotHeld(PacelineError):
    """A wrapper lacks sums that this member has told the others it kept. The step is taken again whole."""


class SumOrder:
    """The way of the gradients of a backward pass into the sum over the ranks.

    This class is the even order: each rank gives the gradients of a pass as one term, and the terms are added up in
    whichever order is fastest. Its attributes are constants, and its methods do nothing.

    Attributes:
        leaves: V, the leaves of the tree in which passes are summed; 0 in the even order.
        is_leaf: True if a pass now is one leaf of the tree.
        name: what runs, in words.
        leaf: the leaf as a node of the tree; None if the gradients of the pass are dropped.
        nodes: for each rank, the nodes of the tree whose sums it gives, from left to right.
        is_first: True if this rank begins its terms with the pass.
        is_last: True if its terms are complete after the pass, and leave.
        is_check: True if the gradients are digested and dropped.
        is_digested: True if the gradients are digested, to be compared with those that other ranks compute.
        root: the rank that gives the sum with the first leaf.
        is_root: True if that is this rank.
        label: stands for the attempt at the step; None in the even order.
        kept: the nodes of which this rank must have sums from an undone attempt.
        kept_label: the label under which it has them.
        spare: most sums that it has at one time.
    """

    leaves: int = 0
    is_leaf: bool = False
    name: str = ""
    leaf: Node | None = None
    nodes: tuple[tuple[Node, ...], ...] = ()
    is_first: bool = True
    is_last: bool = True
    is_check: bool = False
    is_digested: bool = False
    root: int = 0
    is_root: bool = False
    label: object | None = None
    kept: tuple[Node, ...] = ()
    kept_label: object | None = None
    spare: int = 0

    def refusal(self, what: str, *, of_wrappers: bool = False) -> str:
        """Returns why the script may not call `what`, such as "a collective"; empty if it may.

        `of_wrappers` is True if wrappers call it too: it passes while one of them runs (`collectives`).
        """
        del what, of_wrappers
        return ""

    def collectives(self) -> AbstractContextManager[None]:
        """Lets a wrapper's collectives pass inside the block; if it raises, nothing that follows counts."""
        return _NOTHING

    def check_may_agree(self) -> None:
        """Refuses an agreement on a model with the other ranks, if these may be at different microbatches."""

    def check_by_hand(self) -> None:
        """Refuses gradients that are in no leaf of the tree: their sum would depend on the number of ranks."""

    def begin_forward(self) -> None:
        """Notes that a wrapper begins to compute."""

    def begin_pass(self, wrapper: SumsHolder, *, reduces: bool) -> None:
        """Notes that a wrapper begins a backward pass; `reduces` is False if it is to be accumulated by hand."""

    def check_follows(self, before: SumOrder, gradients: Iterable[tuple[str, Any]]) -> None:
        """Checks that the backward pass may follow the wrapper's last one, `before`, and begins without gradients."""

    def check_without_gradients(self, gradients: Iterable[tuple[str, Any]]) -> None:
        """Checks that no parameter has a gradient when a microbatch begins."""

    def digest(self, gradients: Iterable[tuple[str, Any]]) -> None:
        """Adds the parameters' gradients of the pass to a digest, by path."""

    def set_aside(self, wrapper: SumsHolder) -> None:
        """Notes that a wrapper has set the gradients of the pass aside."""

    def summed(self, wrapper: SumsHolder) -> None:
        """Notes that a wrapper has summed the terms of all ranks."""


EVEN = SumOrder()
"""The order outside of steps with microbatches."""
