"""The microbatches of one attempt at a step: hands them out, and tells the group which of them runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._base.shares import Shares
from paceline._base.sum_order import EVEN, Node
from paceline._base.work import Work
from paceline._links.fault import Suspicion
from paceline._microbatch.attempt import AttemptPhase, MicrobatchTurn, StepAttempt
from paceline._microbatch.kept_sums import KeptSums
from paceline._microbatch.microbatch import Batches, Microbatch, MicrobatchedStep, StepGroup, microbatch_seed
from paceline._microbatch.rank_plan import held_of_row, plan_ranks, usual_plan
from paceline._microbatch.twice import compare_twice, computed_twice
from paceline.errors import StepOrderError
from paceline_protocol import Tag
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.elastic")


class StepMicrobatches:
    """The microbatches of one attempt at a step, on this rank.

    Args:
        prepare: has the wrappers of the training state agree on their models; a collective at first use.
        kept: the sums that this rank keeps from an undone attempt; None if no rank keeps any in this job.
        told: the exchange of what each rank has kept, as rows of `row_of_held`; None after a generation's first step.
        shares: the ranks' shares of the step; None for equal ones, as in a generation's first step.
    """

    def __init__(
        self,
        step: MicrobatchedStep,
        group: StepGroup,
        sampler: Batches,
        seed: int,
        *,
        prepare: Callable[[], None],
        seed_frameworks: Callable[..., None],
        kept: KeptSums | None,
        told: Work[Any] | None,
        shares: Shares | None,
        has_mates: bool,
    ) -> None:
        self.step = step
        self._has_mates = has_mates
        self.samples = 0
        self._group = group
        self._sampler = sampler
        self._seed = seed
        self._prepare = prepare
        self._seed_frameworks = seed_frameworks
        self._kept_sums = kept
        self._told = told
        self._compared = False
        """Whether ranks have compared what several have computed, or need not: the state changes next."""
        rank, world, leaves = group.rank, group.size, sampler.microbatches
        self._twice = computed_twice(seed, step.number, world, leaves, sampler.check_every, shares)
        own = self._twice is not None and self._twice.owner == rank
        self._attempt = StepAttempt(
            usual_plan(rank, world, leaves, shares),
            asks=told is not None,
            digested=self._twice.number if own and self._twice is not None else None,
        )

    # Called by the step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins the step's block."""
        self._seed_frameworks(self._seed, self.step.number)
        self._group._core.set_order(self._attempt.between)

    def end(self) -> None:
        """Ends the step's block."""
        self._group._core.set_order(EVEN)

    def read(self) -> tuple[Microbatch, ...]:
        """Returns this rank's microbatches, in order, and before them one of another rank that it checks."""
        if self._attempt.phase is AttemptPhase.ASKING:
            assert self._told is not None
            self._divide(self._told.wait())
        plan, twice = self._attempt.plan, self._twice
        mine = [number for node in plan.nodes[plan.rank] for number in range(*node)]
        check = twice.number if twice is not None and self._checks and not self._compared else None
        turns = self._attempt.turns(check)
        batch = {n: self._sampler.current_microbatch(n) for n in {*mine, *(turn.number for turn in turns)}}
        self.samples = sum(len(indices) for indices, weight in map(batch.__getitem__, mine) if weight)
        return tuple(
            Microbatch(self, turn, batch[turn.number], microbatch_seed(self._seed, self.step.number, turn.number))
            for turn in turns
        )

    @property
    def kept_numbers(self) -> tuple[int, ...]:
        """The microbatches whose gradients this rank has kept from an undone attempt."""
        return tuple(number for node in self._attempt.kept for number in range(*node))

    def own_samples(self) -> int:
        """Returns the number of this rank's samples in an undisturbed step, whether they were read or not."""
        own = map(self._sampler.current_microbatch, self._attempt.usual)
        return sum(len(indices) for indices, weight in own if weight)

    def check_update(self, optimizer: object, *, updates: bool) -> None:
        """See `StepAttempt.check_update`."""
        self._attempt.check_update(optimizer, updates=updates)

    def compare_twice(self) -> None:
        """Compares the gradients of a microbatch that several ranks have computed, before they change anything."""
        twice, self._compared = self._twice, True
        if twice is None or not self._attempt.has_summed:
            return
        if self._checks and not self._attempt.checked:
            raise StepOrderError(
                f"microbatch {twice.number} of rank {twice.owner} is checked here in step {self.step.number}, but was "
                "left out: go through all of step.microbatches"
            )
        compare_twice(self._group, twice, self._attempt.digests, self.step.number)

    def keep(self, base: Tag | None, *, usable: bool, lacks: bool) -> None:
        """Keeps what the wrappers hold of this attempt, which was undone, for the next one.

        `usable` is False if an update may have changed the sums. `lacks` is True if a wrapper had none of the sums that
        this rank has told the others it kept.
        """
        assert self._kept_sums is not None
        if lacks:
            self._kept_sums.refuse()
        elif not usable or self._twice is not None:  # a microbatch that is computed twice is digested whole
            self._kept_sums.drop()
        else:
            self._kept_sums.keep(base, self._attempt)

    # Called by a microbatch -------------------------------------------------------------------------------------------

    def enter(self, turn: MicrobatchTurn, weight: float, seed: Sequence[int]) -> None:
        """See `MicrobatchRunner`."""
        if not self.step.entered or self.step.left:
            raise StepOrderError("`with micro:` belongs inside `with step:`, one microbatch after the other")
        if not self._has_mates:  # they may be in the block of this microbatch already
            self._group._core.mesh.fault.check()  # do not compute a microbatch of a step that will be undone
        self._attempt.enter(turn)
        if turn.is_first or turn.is_check:  # later, the ranks are at different microbatches, so they would not meet
            try:
                self._prepare()
            except BaseException:
                self._attempt.leave(turn, whole=False)
                raise
        self._group._core.set_order(turn)
        self._group._core.set_gradient_weight(weight)
        self._seed_frameworks(*seed)

    def leave(self, turn: MicrobatchTurn, *, whole: bool) -> None:
        """See `MicrobatchRunner`."""
        self._group._core.set_order(self._attempt.between)
        self._group._core.set_gradient_weight(1.0)
        # What is drawn after the microbatches does not depend on how many they were.
        self._seed_frameworks(self._seed, self.step.number)
        if self._attempt.leave(turn, whole=whole) and self._kept_sums is not None:
            self._kept_sums.microbatch_ended(self._attempt)

    @property
    def _checks(self) -> bool:
        """True if this rank computes another rank's microbatch to check it."""
        return self._twice is not None and self._group.rank in self._twice.checkers

    def _divide(self, rows: Sequence[NDArray[np.int64]]) -> None:
        """Divides the microbatches that no rank has kept among all."""
        assert self._kept_sums is not None
        held = [self._held_by(rank, row) for rank, row in enumerate(rows)]
        usable = tuple(() if None in held else nodes or () for nodes in held)
        plan = plan_ranks(usable, self._sampler.microbatches)[self._group.rank]
        self._attempt.divide(plan, self._kept_sums.label)
        if any(usable):
            numbers = ", ".join(map(str, plan.numbers))
            _log.info("step %d is repaired: this rank computes microbatch %s", self.step.number, numbers)

    def _held_by(self, rank: int, row: NDArray[np.int64]) -> tuple[Node, ...] | None:
        """Returns what a rank has kept, None if it refuses any sums; ends the generation if the row cannot be.

        A member finds the breach in its own row, too. It is the best witness.
        """
        try:
            return held_of_row(row)
        except ValueError as error:
            mesh = self._group._core.mesh
            text = f"step {self.step.number}: {mesh.peers[rank]} {error}"
            operation = self._group._core.progress().operation
            mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, rank, operation, text))
            raise mesh.fault.error() from None
