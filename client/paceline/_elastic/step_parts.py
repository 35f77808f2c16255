"""The parts of a step: what a rank computes one after the other, alike in every world (docs/decisions/063)."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline._elastic.foreign import seed_frameworks
from paceline._elastic.sampler import ElasticSampler, Planned
from paceline._group.group_core import PartTurn
from paceline._microbatch.sum_tree import leaves_of

_PARTS = 1 << 41
"""Tells seeds of parts from those of ranks and samples."""


def part_seed(seed: int, step: int, part: int) -> list[int]:
    """Returns the seed of all random numbers of a part."""
    return [seed, step, _PARTS, part]


class PartRunner(Protocol):
    """The step of a part, as the part sees it.

    Attributes:
        rank: this member's rank.
        number: number of the step.
        left: True once its block has ended.
    """

    rank: int
    number: int
    left: bool

    @property
    def sampler(self) -> ElasticSampler:
        """The sampler, at this step's batch."""

    def enter_part(self, turn: PartTurn, weight: float) -> None:
        """Begins a part.

        Raises:
            StepOrderError: it is not the turn of this part.
            PacelineError: the generation has failed.
        """

    def leave_part(self, turn: PartTurn, *, whole: bool) -> None:
        """Ends a part; `whole` is False if its block raised."""


class StepPart:
    """One part of a step's batch; a context manager around the code that computes it.

    Its samples, weight and random numbers follow from (seed, step, part), and not from the rank or the world. When the
    block begins, torch's generator is seeded with them, as `rng` is.

    Attributes:
        number: v, from 0.
        indices: indices of its samples, shape [b_v]; a single one of weight 0 if the part has none.
        weight: weight of its mean loss, b_v / b; `DDP.backward` and torch's wrapper take it by default.
        is_check: True if its gradients are not added to those of the step: it is another worker's part, and they are
            only compared (`ElasticSampler(..., check_every=100)`); or the step is repaired after a failure, and nothing
            else is left for this worker. Compute it like the others, but leave it out of sums of your own.
    """

    def __init__(
        self,
        runner: PartRunner,
        turn: PartTurn,
        share: tuple[NDArray[np.intp], float],
        seed: list[int],
    ) -> None:
        self.number = turn.number
        self.is_check = turn.is_check or turn.share.repeats
        self.indices, self.weight = share
        self._runner = runner
        self._turn = turn
        self._seed = seed

    def __repr__(self) -> str:
        return f"<StepPart {self.number} of {self._turn.parts}, {self.samples} samples>"

    @property
    def samples(self) -> int:
        """Number of its samples, b_v."""
        return len(self.indices) if self.weight else 0

    @property
    def rng(self) -> np.random.Generator:
        """A random generator seeded with (seed, step, part): the same in every world and attempt."""
        return np.random.default_rng(self._seed)

    @property
    def step(self) -> PartRunner:
        """The step that it is a part of."""
        return self._runner

    def ahead(self) -> Iterator[Planned]:
        """Yields this part, and what the rank computes after it if the world stays as it is; never ends."""
        ahead, share = self._runner.sampler.parts_ahead, self._turn.share
        usual = range(*leaves_of(share.rank, len(share.nodes), share.parts))
        if self._turn.is_check:
            return ahead([self.number, *share.numbers], usual)
        return ahead(share.numbers[share.numbers.index(self.number) :], usual)

    def __enter__(self) -> StepPart:
        self._runner.enter_part(self._turn, self.weight)
        seed_frameworks(*self._seed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.leave_part(self._turn, whole=error is None)
