"""Keeps sums of microbatches from an undone step, in the buckets of this member's wrappers (docs/decisions/18).

The state after a step follows from the state before it, the seed and the step. So does the gradient of each
microbatch: in the next attempt, in another generation, it is as good as in the one that was undone, if the state before
is the same.

Sums are kept only if it is certain which microbatches are in them, in all wrappers alike. Otherwise they are computed
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline._base.sum_order import Node, SumsHolder
from paceline._base.work import Work
from paceline._microbatch.attempt import AttemptPhase, StepAttempt
from paceline._microbatch.microbatch import StepGroup
from paceline._microbatch.rank_plan import row_of_held
from paceline._microbatch.sum_tree import joined
from paceline_protocol import Tag


class KeptSums:
    """The sums of microbatches that one member brings to the next attempt at a step.

    The sums themselves lie in the buckets of the wrappers. `label` stands for the attempt in which the wrappers got or
    last kept these sums; sums with another label do not count.
    """

    def __init__(self) -> None:
        self._due = False
        """True until the ranks have begun to tell each other what they have, in the first step of a generation."""
        self._holders: Sequence[SumsHolder] = ()
        """The wrappers of the last microbatch that this member has ended."""
        self._base: Tag | None = None
        """The state before the undone step."""
        self.label = object()
        self._nodes: tuple[Node, ...] = ()
        self._refuses = False

    def enter(self, base: Tag | None) -> None:
        """Enters a generation. `base` is the state that it begins from; None if this member came as a newcomer."""
        self._due = True
        if base is None or base != self._base:
            self.drop()

    def drop(self) -> None:
        """Forgets all sums, because another step begins, or another state."""
        self._base, self._nodes = None, ()

    def step_over(self) -> None:
        """Forgets all sums and any refusal, because the step is over."""
        self.drop()
        self._refuses = False

    def refuse(self) -> None:
        """Has all ranks take the step again whole: the script has made other wrappers, which have no sums."""
        self.drop()
        self._refuses = True

    def microbatch_ended(self, attempt: StepAttempt) -> None:
        """Notes which wrappers take part in the script's loop: those that were in a whole microbatch."""
        self._holders = tuple(attempt.wrappers)

    def keep(self, base: Tag | None, attempt: StepAttempt) -> None:
        """Keeps what the wrappers hold of an attempt that is over, if it is certain that all hold the same.

        The microbatch whose block raised is kept too if its gradients are in all sums. So what the script does behind
        the backward pass in `with micro:` may never run for it.
        """
        if attempt.phase is AttemptPhase.ASKING:  # it failed before this member used what it has
            return
        self._refuses = False
        known = all(any(holder is other for other in self._holders) for holder in attempt.wrappers)
        held = [holder.held_sums() for holder in self._holders]
        first = next(iter(held), None)
        self.drop()  # but not `label`: sums from an earlier attempt that this one has not used yet still have it
        if first is None or base is None or not known or any(other != first for other in held):
            return
        label, nodes = first
        if label in (attempt.label, self.label) and joined(nodes, attempt.plan.leaves) in attempt.whole():
            self._base, self.label, self._nodes = base, label, nodes

    def tell(self, group: StepGroup, step: int, leaves: int) -> Work[Any] | None:
        """Tells the other ranks what this one has, and hears what they have; None if they know already.

        A collective of the first step of a generation, which begins before the step's block.
        """
        due, self._due = self._due, False
        if not due:
            return None
        # Release 0.1.0 gathers a row of shape [V] under this label, too. To tell more, add a collective of its own, in
        # generations whose version has it (docs/development/protocol-changes.md).
        told: Work[Any] = group.all_gather(
            row_of_held(self.nodes(), leaves)[None], label=f"parts-{step}", async_op=True
        )
        return told

    def nodes(self) -> tuple[Node, ...] | None:
        """Returns the nodes of which this member brings the sums, in the new generation; None to refuse any sums."""
        if self._refuses:
            return None
        for holder in self._holders:
            holder.recover_sums()
        if any(holder.held_sums() != (self.label, self._nodes) for holder in self._holders):
            self.drop()
        return self._nodes
