"""A microbatch as the script sees it (docs/decisions/17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline._base.sum_order import SumOrder
from paceline._links.base import Mesh, Peer
from paceline._microbatch.attempt import MicrobatchTurn

_MICROBATCHES = 1 << 41
"""Tells seeds of microbatches from seeds of ranks and samples."""


def microbatch_seed(seed: int, step: int, number: int) -> list[int]:
    """Returns the seed of all random numbers of a microbatch."""
    return [seed, step, _MICROBATCHES, number]


class StepGroupCore(Protocol):
    """The part of a group's inside that this package uses."""

    @property
    def mesh(self) -> Mesh:
        """The links to the members."""

    def set_order(self, order: SumOrder) -> None:
        """Sets the order in which gradients are summed from now on."""

    def set_gradient_weight(self, weight: float) -> None:
        """Sets the weight of this member's gradients from now on."""

    def progress(self) -> Any:
        """Returns the operation that this member is at."""


class StepGroup(Protocol):
    """The part of `paceline.Group` that this package uses."""

    @property
    def _core(self) -> StepGroupCore:
        """Its inside."""

    @property
    def rank(self) -> int:
        """This member's rank."""

    @property
    def size(self) -> int:
        """W."""

    @property
    def members(self) -> Sequence[Peer]:
        """The members in rank order."""

    def all_gather(self, x: Any, *, label: Any = "", async_op: Any = False) -> Any:
        """Joins the arrays of all ranks on axis 0."""

    def barrier(self) -> Any:
        """Waits for all ranks."""


class Batches(Protocol):
    """The part of an `ElasticSampler` that this package uses."""

    microbatches: int
    check_every: int

    def current_microbatch(self, number: int) -> tuple[NDArray[np.intp], float]:
        """Returns one microbatch of the present batch, and its weight."""

    def microbatches_ahead(self, numbers: Sequence[int], usual: Sequence[int]) -> Iterator[Any]:
        """Yields microbatches of the present batch, then those of all later ones."""


class MicrobatchedStep(Protocol):
    """The step of a microbatch, as the microbatch sees it."""

    rank: int
    number: int
    entered: bool
    left: bool

    @property
    def sampler(self) -> Any:
        """The sampler, at this step's batch."""


class MicrobatchRunner(Protocol):
    """Enters and leaves turns."""

    step: MicrobatchedStep

    def enter(self, turn: MicrobatchTurn, weight: float, seed: Sequence[int]) -> None:
        """Begins a turn, if it is its turn."""

    def leave(self, turn: MicrobatchTurn, *, whole: bool) -> None:
        """Ends a turn; `whole` is False if its block raised."""


class Microbatch:
    """One microbatch of a step; a context manager around the code that computes it.

    Its samples, weight and random numbers follow from (seed, step, microbatch), and not from the rank or the world.
    When the block begins, torch's generator is seeded with them, as `rng` is.

    Attributes:
        number: v, from 0.
        indices: indices of its samples, shape [b_v]; a single one of weight 0 if the microbatch has none.
        weight: weight of its mean loss, b_v / b; `DDP.backward` and torch's wrapper take it by default.
        is_check: True if its gradients are not added to those of the step: it is another worker's microbatch, and they
            are only compared (`ElasticSampler(..., check_every=100)`); or the step is repaired after a failure, and
            nothing else is left for this worker. Compute it like the others, but leave it out of sums of your own.
    """

    def __init__(
        self, runner: MicrobatchRunner, turn: MicrobatchTurn, share: tuple[NDArray[np.intp], float], seed: list[int]
    ) -> None:
        self.number = turn.number
        self.is_check = turn.leaf is None or turn.is_check
        self.indices, self.weight = share
        self._runner = runner
        self._turn = turn
        self._seed = seed

    def __repr__(self) -> str:
        return f"<Microbatch {self.number} of {self._turn.leaves}, {self.samples} samples>"

    @property
    def samples(self) -> int:
        """Number of its samples, b_v."""
        return len(self.indices) if self.weight else 0

    @property
    def rng(self) -> np.random.Generator:
        """A random generator seeded with (seed, step, microbatch): the same in every world and attempt."""
        return np.random.default_rng(self._seed)

    @property
    def step(self) -> MicrobatchedStep:
        """The step that it belongs to."""
        return self._runner.step

    def ahead(self) -> Iterator[Any]:
        """Yields this one, and what the rank computes after it if the world stays as it is; never ends."""
        ahead, now = self.step.sampler.microbatches_ahead, self._turn.plan.numbers
        ahead_now = [self.number, *now] if self._turn.is_check else now[now.index(self.number) :]
        return ahead(ahead_now, self._turn.usual)  # type: ignore[no-any-return]

    def __enter__(self) -> Microbatch:
        self._runner.enter(self._turn, self.weight, self._seed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.leave(self._turn, whole=error is None)
