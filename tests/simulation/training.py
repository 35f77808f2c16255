"""A job with microbatches: the real state, sampler, wrapper and optimizer, around a model of eight numbers.

One process alone, and without any of that, computes what must come out after each step: `expected`. Its sums have the
same bits only if each microbatch of a step is in them once, in the tree's order. Workers build different models, so
that one which has not taken the base shows too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from simulation.state import Spoiled
from simulation.threads import current

import paceline
from paceline._elastic.state import StateCore
from paceline._microbatch.microbatch import microbatch_seed
from paceline._microbatch.sum_tree import split_of
from paceline._parallel._parameter import Parameter
from paceline_protocol import WHOLE, Share

if TYPE_CHECKING:
    from simulation.process import Process

__all__ = ["MICROBATCHES", "Training", "expected"]

MICROBATCHES = 7
"""Of each step: more than members, and no power of two."""

_SAMPLES, _BATCH = 40, 11
_TABLE = np.random.default_rng(1).standard_normal((_SAMPLES, 8)).astype(np.float32) * np.float32(10) ** np.arange(
    -3, 5, dtype=np.float32
)
"""What the gradient of a sample depends on; of so different sizes that the order of additions shows."""


class _Model:
    """A module of two parameters, which get two buckets."""

    def __init__(self, origin: int) -> None:
        values = np.random.default_rng(origin).standard_normal(8).astype(np.float32)
        self.first, self.second = Parameter(values[:5].copy()), Parameter(values[5:].copy())
        self._rows: NDArray[np.intp] = np.zeros(0, np.intp)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "first", self.first
        yield "second", self.second

    @property
    def values(self) -> NDArray[np.float32]:
        """All numbers, shape [8]."""
        return np.concatenate([self.first.data, self.second.data])

    def forward(self, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        self._rows = rows
        return _TABLE[rows]

    def backward(self, dy: NDArray[np.float32]) -> None:
        gradient = _gradient(self.values, self._rows, dy)
        self.second.accumulate(gradient[5:])
        self.first.accumulate(gradient[:5])


def _gradient(values: NDArray[np.float32], rows: NDArray[np.intp], dy: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.sum(dy * (_TABLE[rows] + values), axis=0, dtype=np.float32)


def _loss_gradient(rows: NDArray[np.intp], rng: np.random.Generator) -> NDArray[np.float32]:
    """Of the mean loss over the samples of a microbatch, shape [B, 1]."""
    return rng.random((len(rows), 1), np.float32) / np.float32(len(rows))


class _Optimizer(paceline.optim.SGD):
    """One whose next update may be interrupted half way: `interrupt` is called then."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, lr=0.1, momentum=0.5)
        self.interrupt: Callable[[], None] | None = None

    def step(self) -> None:
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            next(iter(self.parameters.values())).data[...] += 1
            interrupt()
            raise Spoiled("the update was interrupted")
        super().step()


def _sampler() -> paceline.ElasticSampler:
    return paceline.ElasticSampler(_SAMPLES, global_batch=_BATCH, seed=3, microbatches=MICROBATCHES)


@functools.cache
def expected(origin: int, steps: int, *, twice: bool) -> bytes:
    """The numbers after so many steps, as one process computes them with no worker, bucket or link.

    Args:
        origin: of the model.
        steps: how many.
        twice: every other step has two updates.
    """
    return _alone(origin, twice)[steps]


@functools.cache
def _alone(origin: int, twice: bool) -> list[bytes]:
    model, sampler = _Model(origin), _sampler()
    optimizer, found = _Optimizer(model), [model.values.tobytes()]
    for step in range(1, 31):
        for _ in range(1 + (twice and step % 2)):
            terms = []
            for number in range(MICROBATCHES):
                rows, weight = sampler.current_microbatch(number)
                dy = _loss_gradient(rows, np.random.default_rng(microbatch_seed(0, step, number)))
                gradient = _gradient(model.values, rows, dy * weight) if weight else np.zeros(8, np.float32)
                terms.append(np.append(gradient, np.float32(weight)))
            sums = _sum_of(terms, 0, MICROBATCHES)
            mean = sums[:8] / float(sums[8])
            model.first.grad, model.second.grad = mean[:5], mean[5:]
            optimizer.step()
        sampler.advance(1)
        found.append(model.values.tobytes())
    return found


def _sum_of(terms: list[NDArray[np.float32]], lo: int, hi: int) -> NDArray[np.float32]:
    if hi - lo == 1:
        return terms[lo]
    middle = split_of((lo, hi))
    return _sum_of(terms, lo, middle) + _sum_of(terms, middle, hi)


class Training(StateCore):
    """The training state of one process, with what the user's code does in a step.

    Args:
        process: whose.

    Attributes:
        spoil_next: the next update will be interrupted.
    """

    def __init__(self, process: Process) -> None:
        origin = process.ticks % 3
        self.process = process
        self.spoil_next = False
        self._model = _Model(origin)
        self._ddp = paceline.DDP(self._model, process.group, bucket_mb=16 / 2**20)
        self._optimizer = _Optimizer(self._ddp)
        self._history: dict[str, Any] = {"origin": origin, "applied": []}
        super().__init__(model=self._ddp, optimizer=self._optimizer, sampler=_sampler(), history=self._history)

    @property
    def _core(self) -> Training:
        return self  # its inside is no object of its own

    @property
    def bits(self) -> tuple[object, ...]:
        """The generations in which steps were applied."""
        return tuple(self._history["applied"])

    @property
    def parts(self) -> dict[Share, tuple[object, ...]]:
        """For each share the bits that its elements are of."""
        return {WHOLE: self.bits}

    @property
    def is_as_expected(self) -> bool:
        """True if the numbers are those of one process."""
        twice = self.process.world.shape.twice
        return self._model.values.tobytes() == expected(self._history["origin"], self.step, twice=twice)

    def train(self, step: Any, update: Callable[..., None]) -> None:
        """One attempt at a step, inside its block."""
        if self.process.world.shape.twice and step.number % 2:
            step.keep_copy()
            self._compute(step)
            update(step.generation, half=True)
            self.process.group.all_reduce(0.0, label="between")
            self._compute(step)
            update(step.generation)
            self.process.group.all_reduce(0.0, label="behind")
        else:
            self._compute(step)
            update(step.generation)

    def _compute(self, step: Any) -> None:
        process = self.process
        self._optimizer.zero_grad()
        microbatches = step.microbatches
        if step.kept_microbatches:
            process.world.repairs += 1
            process.world.note(process.name, f"keeps the microbatches {step.kept_microbatches} of step {step.number}")
        for micro in microbatches:
            with micro:
                process.world.moment("microbatch", process)
                process.compute(MICROBATCHES // 2)
                self._ddp(micro.indices)
                self._ddp.backward(_loss_gradient(micro.indices, micro.rng))
        if step.number % 3 == 2:  # a metric that nobody waits for but the gate
            process.group.all_reduce(0.0, label="metric", async_op=True)

    def run_optimizer(self, generation: int, *, half: bool = False) -> None:
        """`optimizer.step()` of the user's code, behind which it notes what it has done."""
        if self.spoil_next:
            self.spoil_next = False
            seconds = self.process.world.delay(0.0, 1.0)  # the generation may fail meanwhile
            self._optimizer.interrupt = lambda: current().park(seconds) and None
        self._optimizer.step()
        if not half:
            self._history["applied"].append(generation)

    def advance(self, world: int) -> None:
        """See `StateCore.advance`."""
        super().advance(world)
        self.process.applied(self._history["applied"][-1], self.step)
