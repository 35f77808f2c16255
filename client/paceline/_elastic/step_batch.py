"""A rank's share of a step: its samples, their weight, and its random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._base.shares import Shares
from paceline._base.work import Work
from paceline._elastic.foreign import seed_frameworks
from paceline._elastic.sampler import ElasticSampler
from paceline._elastic.state import StateCore
from paceline._group import Group
from paceline._microbatch.kept_sums import KeptSums
from paceline._microbatch.microbatch import Microbatch
from paceline._microbatch.step_microbatches import StepMicrobatches
from paceline.errors import StepOrderError, UnsupportedOp


class StepBatch:
    """The batch of one attempt at a step, on one rank; the base class of `Step`.

    Attributes:
        number: number of the step, from 1, counted over the whole job.
        rank, world: this member's place in the view of this attempt.
        shares: the microbatches, or else the samples, of each rank in a whole batch; None for equal shares.
        entered, left: whether the step's block has begun, and whether it has ended.
    """

    def __init__(
        self,
        number: int,
        group: Group,
        state: StateCore,
        seed: int,
        kept: KeptSums | None,
        told: Work[Any] | None,
        shares: Shares | None,
        *,
        has_mates: bool,
    ) -> None:
        self.number = number
        self.rank, self.world = group.rank, group.size
        self.entered = self.left = False
        self.shares = shares
        self._group = group
        self._state = state
        self._seed = seed
        self._has_mates = has_mates
        self._share: tuple[NDArray[np.intp], float] | None = None
        """This rank's indices and weight from the sampler; None until they are read."""
        self._counted: float | None = None
        """This rank's weight as given to `count`; None if `count` was not called."""
        self._micro: StepMicrobatches | None = None
        """None if the sampler has no microbatches."""
        if state.sampler is not None and state.sampler.microbatches:
            self._micro = StepMicrobatches(
                self,
                group,
                state.sampler,
                seed,
                prepare=state.prepare,
                seed_frameworks=seed_frameworks,
                kept=kept,
                told=told,
                shares=shares,
                has_mates=has_mates,
            )

    @property
    def indices(self) -> NDArray[np.intp]:
        """Indices of this rank's samples in the step, shape [b_r]; a single one of weight 0 if the rank has none.

        Raises:
            UnsupportedOp: the training state has no sampler, or its sampler has microbatches, each with its own.
        """
        return self._of_sampler()[0]

    @property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """This rank's microbatches, in order: `for micro in step.microbatches: with micro: ...`, inside `with step:`.

        Each takes one forward and one backward pass through the wrapped model. Gradients are set aside after each;
        after the last they are the whole batch's. So clear them before the first, and update after the last. A step
        with several updates goes through its microbatches once for each, and reads them anew each time: after a failure
        the first loop has only those that were lost.

        In the first step of a generation the first reading waits until ranks have told each other what they have kept.

        Raises:
            UnsupportedOp: the training state has no sampler, or its sampler has no microbatches.
            PacelineError: the generation has failed.
        """
        if self._micro is None:
            raise UnsupportedOp(f"{self.sampler} has no microbatches: make it with ElasticSampler(..., microbatches=8)")
        return self._micro.read()

    @property
    def kept_microbatches(self) -> tuple[int, ...]:
        """Microbatches whose gradients this rank has kept from an undone attempt: they are not in `microbatches`.

        Empty until this attempt has read `microbatches`. What other ranks have kept is in neither.
        """
        return () if self._micro is None else self._micro.kept_numbers

    @property
    def weight(self) -> float:
        """Weight of this rank's mean loss, b_r / b. For `ddp.backward(dy, step.weight)`; torch's wrapper reads it.

        Raises:
            UnsupportedOp: the training state has no sampler, and `count` was not called; or its sampler has
                microbatches.
        """
        return self._of_sampler()[1] if self._counted is None else self._counted

    def count(self, weight: float, of: object) -> None:
        """Sets this rank's weight in the step, for data sources other than an `ElasticSampler`.

        Args:
            weight: b_r / b, samples of this rank over those of all ranks; 0 if it has none.
            of: the data source. It must be a part of the training state, so that its position is undone with the step
                and is included in checkpoints and in what newcomers receive.

        Raises:
            UnsupportedOp: `of` is no part of the training state, or the state has a sampler, which sets the weight.
            StepOrderError: the step is over, or has a weight already: a step takes one batch.
        """
        self._check_source(of)
        self._counted = weight
        self._group._core.set_gradient_weight(weight)

    def _check_source(self, of: object) -> None:
        """Raises what `count` would raise now."""
        name = type(of).__name__
        if not self._state.has(of):
            raise UnsupportedOp(f"this {name} is no part of the training state: give it to TrainState(data=..., ...)")
        if self._state.sampler is not None:
            raise UnsupportedOp(f"the training state has a sampler beside this {name}: leave out one of the two")
        if self.left or self._counted is not None:
            why = "is over" if self.left else "already has its batch"
            raise StepOrderError(f"step {self.number} {why}: this {name} gives one batch per attempt, inside the block")

    @property
    def samples(self) -> int:
        """Number of this rank's samples in the step; 0 until they were read (`indices`, `weight`, `microbatches`)."""
        if self._micro is not None:
            return self._micro.samples
        return len(self._share[0]) if self._share is not None and self._share[1] else 0

    @property
    def lr_scale(self) -> float:
        """The factor for the learning rate: the world's size with `per_rank_batch`, else 1."""
        return self.sampler.lr_scale(self.world)

    @property
    def sampler(self) -> ElasticSampler:
        """The training state's sampler. In the step's block it is at this step's batch; it moves when the step counts.

        Raises:
            UnsupportedOp: the training state has no sampler.
        """
        if self._state.sampler is None:
            raise UnsupportedOp(
                "the training state has no sampler: give it one, TrainState(sampler=ElasticSampler(...))"
            )
        return self._state.sampler

    @property
    def rng(self) -> np.random.Generator:
        """A random generator seeded with (seed, step, rank): the same in every attempt of the same world.

        Raises:
            UnsupportedOp: the sampler has microbatches, which have generators of their own.
        """
        self._refuse_with_microbatches("step.rng", "micro.rng")
        return np.random.default_rng([self._seed, self.number, self.rank])

    def rng_for(self, index: int) -> np.random.Generator:
        """Returns a random generator seeded with (seed, step, sample): the same on every rank."""
        return np.random.default_rng([self._seed, self.number, 1 << 40, int(index)])

    def _begin_batch(self) -> None:
        """Seeds the generators of frameworks, when the step's block begins."""
        if self._micro is not None:
            self._micro.begin()
        else:
            seed_frameworks(self._seed, self.number, self.rank)
        if self._has_mates and self._micro is None and self._state.sampler is not None:
            self._of_sampler()  # a stage of a pipeline may read no samples, and weighs as much as the others

    def _end_batch(self) -> None:
        self._group._core.set_gradient_weight(1.0)
        self._state.block_over()
        if self._micro is not None:
            self._micro.end()

    def _of_sampler(self) -> tuple[NDArray[np.intp], float]:
        self._refuse_with_microbatches("a rank's share of the batch", "micro.indices and micro.weight")
        if self._share is None:
            self._share = self.sampler.current(self.rank, self.world, self.shares)
            self._group._core.set_gradient_weight(self._share[1])
        return self._share

    def _own_samples(self) -> int:
        """Returns the number of this rank's samples, whether they were read or not."""
        if self._micro is not None:
            return self._micro.own_samples()
        if self._state.sampler is None:
            return 0
        indices, weight = self._state.sampler.current(self.rank, self.world, self.shares)
        return len(indices) if weight else 0

    def _refuse_with_microbatches(self, what: str, instead: str) -> None:
        if self._micro is not None:
            raise UnsupportedOp(
                f"{what} follows the rank, so the result would depend on the number of workers: the sampler has "
                f"microbatches, so take {instead} in `for micro in step.microbatches: with micro: ...`"
            )
