"""Keeps sums of parts from an undone step, in the buckets of this member's wrappers (docs/decisions/064).

The state after a step follows from the state before it, the seed and the step. So does the gradient of each part: in
the next attempt, in another generation, it is as good as in the one that was undone, if the state before is the same.
`KeptParts` says which sums a member may bring to the next attempt. `PartProgress` counts the parts of one attempt.

Sums are kept only if it is certain which parts are in them, in all wrappers alike. Otherwise they are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline._base.work import Work
from paceline._group import Group
from paceline._group.group_core import PartHolder, PartRecord, PartTurn
from paceline._microbatch.rank_plan import RankPlan, row_of_held
from paceline._microbatch.sum_tree import Node, joined
from paceline.errors import StepOrderError
from paceline_protocol import Tag


class PartProgress:
    """How far a member is with its parts in one attempt at a step.

    Args:
        share: what it does with the parts, unless the step is repaired.

    Attributes:
        share: what it does with the parts in the present loop over them.
        record: what the wrappers have done.
        kept: the nodes whose sums this member has kept from an undone attempt.
        divided: False until it is known what the ranks have kept, in the first step of a generation.
        next: the part whose turn it is.
    """

    def __init__(self, share: RankPlan) -> None:
        self.share = self._usual = share
        self.record = PartRecord()
        self.kept: tuple[Node, ...] = ()
        self.divided = True
        self.next = share.numbers[0]
        self._loops = 0
        self._ended: set[PartTurn] = set()
        self._whole: list[Node] = []
        self._begun: Node | None = None

    @property
    def first(self) -> int:
        """This member's first part."""
        return self.share.numbers[0]

    def repair(self, share: RankPlan, kept: PartRecord) -> None:
        """Takes what this member does in the first loop over the parts, and the record of the sums that it has kept."""
        self.record.kept = kept
        self.share, self.divided = self._usual if share == self._usual else share, True
        self.next = share.numbers[0]
        self.kept = share.kept
        self._whole = list(share.kept)

    def begin(self, turn: PartTurn) -> None:
        """Begins a part.

        Raises:
            StepOrderError: it is not its turn.
        """
        if turn.share is not self.share or turn in self._ended:
            raise StepOrderError(
                f"part {turn.number} is of an earlier loop: read step.parts again for each loop over the parts, "
                "because after a failure the first loop of a step may have fewer"
            )
        if (self.first if turn.is_check else turn.number) != self.next:
            raise StepOrderError(f"part {turn.number} begins, but it is the turn of part {self.next}")
        self._loops += turn.is_first
        self._begun = None if turn.share.repeats or turn.is_check else (turn.number, turn.number + 1)

    def end(self, turn: PartTurn) -> None:
        """Ends a part, of which all is done."""
        self._ended.add(turn)
        if self._begun is not None:
            self._whole.append(self._begun)
            self._begun = None
        if turn.is_check:
            return
        numbers = self.share.numbers
        self.next = numbers[0] if turn.is_last else numbers[numbers.index(turn.number) + 1]
        if turn.is_last:
            self.share, self.next = self._usual, self._usual.numbers[0]

    def finished(self) -> list[tuple[Node, ...]]:
        """Returns the nodes that a wrapper may hold: of whole parts, and with the part that an error has ended.

        Empty if the parts were begun a second time in this step: then sums may be of either time. Also before a part is
        whole: then it is not known which wrappers are in a part.
        """
        if self._loops > 1 or not self._whole:
            return []
        parts = self.share.parts
        broken = [] if self._begun is None else [self._begun]
        return [joined(self._whole, parts), joined([*self._whole, *broken], parts)]


class KeptParts:
    """The sums of parts that one member brings to the next attempt at a step.

    Attributes:
        record: of the attempt in which wrappers have got or kept these sums.
    """

    def __init__(self) -> None:
        self._due = False
        """True until the ranks have begun to tell each other what they have, in the first step of a generation."""
        self._holders: Sequence[PartHolder] = ()
        """The wrappers of the last part that this member has ended."""
        self._base: Tag | None = None
        """The state before the undone step."""
        self.record = PartRecord()
        self._nodes: tuple[Node, ...] = ()
        self._refuses = False

    def enter(self, base: Tag | None) -> None:
        """Enters a generation.

        Args:
            base: the state that it begins from, if this member has held it since the last attempt; else None.
        """
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

    def part_ended(self, record: PartRecord) -> None:
        """Notes which wrappers take part in the script's loop: those that were in a whole part."""
        self._holders = tuple(record.wrappers)

    def keep(self, base: Tag | None, progress: PartProgress) -> None:
        """Keeps what the wrappers hold of an undone step; nothing if it is not certain that all hold the same parts.

        Args:
            base: the state before the step.
            progress: how far this member was.
        """
        if not progress.divided:  # the attempt failed before this member used what it has
            return
        self._refuses = False
        progress.record.kept = None  # the attempt is over
        known = all(any(holder is other for other in self._holders) for holder in progress.record.wrappers)
        held = [holder.held_parts() for holder in self._holders]
        first, finished = next(iter(held), None), progress.finished()
        self.drop()
        if first is None or base is None or not known or any(other != first for other in held):
            return
        record, nodes = first
        if record in (progress.record, self.record) and joined(nodes, progress.share.parts) in finished:
            self._base, self.record, self._nodes = base, record, nodes

    def tell(self, group: Group, step: int, parts: int) -> Work[Any] | None:
        """Tells the other ranks what this one has, and hears what they have; None if they know already.

        A collective of the first step of a generation, which begins before the step's block.
        """
        due, self._due = self._due, False
        if not due:
            return None
        return group.all_gather(row_of_held(self.nodes(), parts)[None], label=f"parts-{step}", async_op=True)

    def nodes(self) -> tuple[Node, ...] | None:
        """Returns the nodes of which this member brings the sums, in the new generation; None to refuse any sums."""
        if self._refuses:
            return None
        for holder in self._holders:
            holder.recover_parts()
        if any(holder.held_parts() != (self.record, self._nodes) for holder in self._holders):
            self.drop()
        return self._nodes
