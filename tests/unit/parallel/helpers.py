"""Small models, the plain training that DDP must equal, and a group that records what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paceline import nn
from paceline._base.sum_order import EVEN
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._links.base import Peer
from paceline._parallel import DDP, Parameter
from paceline.compression import Codec
from paceline.optim import Optimizer
from support.parts import each

Array = NDArray[Any]
Weights = dict[str, Array]

N, INPUTS, CLASSES = 400, 12, 5


def mlp(seed: int = 0, dtype: DTypeLike = np.float64) -> nn.Sequential:
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, 16, rng=rng, dtype=dtype),
        nn.ReLU(),
        nn.Linear(16, 8, rng=rng, dtype=dtype),
        nn.ReLU(),
        nn.Linear(8, CLASSES, rng=rng, dtype=dtype),
    )


def samples(dtype: DTypeLike = np.float64) -> tuple[Array, Array]:
    rng = np.random.default_rng(99)
    return rng.standard_normal((N, INPUTS)).astype(dtype), rng.integers(0, CLASSES, N)


def weights(module: Any) -> Weights:
    return {path: p.data.copy() for path, p in module.named_parameters()}


def gradient(parameter: Parameter) -> Array:
    """A copy of what must be there."""
    assert parameter.grad is not None
    return parameter.grad.copy()


def gradients(module: Any) -> dict[str, Array | None]:
    return {path: None if p.grad is None else gradient(p) for path, p in module.named_parameters()}


def train_alone(module: nn.Sequential, optimizer: Optimizer, sampler: ElasticSampler, steps: int) -> Weights:
    """One process, no wrapper: what every world must equal."""
    x, labels = samples(module.modules[0].weight.data.dtype)  # type: ignore[attr-defined]
    for step in range(steps):
        indices = sampler.batch(step)
        _, dy = nn.softmax_cross_entropy(module.forward(x[indices]), labels[indices])
        optimizer.zero_grad()
        module.backward(dy)
        optimizer.step()
    return weights(module)


def train_ranks(
    group: Group,
    module: nn.Sequential,
    make_optimizer: Callable[[DDP], Optimizer],
    sampler: ElasticSampler,
    steps: int,
    bucket_mb: float = 25,
) -> Weights:
    """The same on one of several ranks."""
    x, labels = samples(module.modules[0].weight.data.dtype)  # type: ignore[attr-defined]
    ddp = DDP(module, group, bucket_mb=bucket_mb)
    optimizer = make_optimizer(ddp)
    for step in range(steps):
        indices, weight = sampler.share(step, group.rank, group.size)
        _, dy = nn.softmax_cross_entropy(ddp(x[indices]), labels[indices])
        optimizer.zero_grad()
        ddp.backward(dy, weight)
        optimizer.step()
    return weights(module)


class Branches:
    """y = x * w for the scales that `use` names, in turn; one may be named twice. Backward goes the other way."""

    def __init__(self, use: str, **scales: Parameter) -> None:
        self.use = use
        self.scales = scales
        self.before_backward_of: Callable[[str], None] = lambda name: None
        self._inputs: list[Array] = []

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.scales.items()

    def forward(self, x: Array) -> Array:
        self._inputs = []
        for name in self.use:
            self._inputs.append(x)
            x = x * self.scales[name].data
        return x

    def backward(self, dy: Array) -> Array:
        for name, x in zip(reversed(self.use), reversed(self._inputs), strict=True):
            self.before_backward_of(name)
            product = (dy * x).sum(axis=0)
            one_for_all = self.scales[name].data.size == 1
            self.scales[name].accumulate(product.sum(keepdims=True) if one_for_all else product)
            dy = dy * self.scales[name].data
        return dy


def scale(*values: float, dtype: DTypeLike = np.float64, requires_grad: bool = True) -> Parameter:
    return Parameter(np.array(values, dtype), requires_grad)


def run_open(groups: list[Group], fn: Callable[[Group], None]) -> None:
    """As `paceline.testing.run_groups`, but the groups stay open, for other threads to go on with."""

    def run(group: Group) -> None:
        try:
            fn(group)
        finally:
            group.hand_over()

    for end in each(groups, run):
        if end is not None:
            raise end


@dataclass
class DoneWork:
    result: Array

    def wait(self, timeout: float | None = None) -> Array:
        return self.result

    def done(self) -> bool:
        return True


@dataclass
class RecordingGroup:
    """A world of `size` equal ranks, seen from rank 0: a sum is `size` times the argument. Writes a log."""

    size: int = 2
    rank: int = 0
    log: list[str] = field(default_factory=list)
    fail_at: int = 0
    """Number, from 1, of the all_reduce of gradients that fails; 0 for none."""
    generation: int = 1
    has_same_state: bool = False
    members: tuple[Peer, ...] = ()
    ban_reason: str = ""
    engine_name: str = "links"
    order = EVEN
    take_piggyback: Callable[[], None] = lambda: None
    _reductions: int = 0

    @property
    def _core(self) -> RecordingGroup:
        return self  # its inside is no object of its own

    def all_reduce(
        self, x: Array, *, op: Any = "sum", out: Any = None, divisor: Any = None, async_op: Any = False
    ) -> Any:
        if out is None:
            # A table with one row for each rank: all say the same.
            return np.broadcast_to(x[0], x.shape).copy()
        self._reductions += 1
        self.log.append(f"send {x.size}" if async_op else f"reduce {x.size}")
        if self._reductions == self.fail_at:
            raise ConnectionError("as ordered")
        np.multiply(x, self.size, out=out)
        if divisor is not None:
            np.divide(out, divisor(), out=out)
        return DoneWork(out) if async_op else out

    def all_reduce_compressed(self, x: Array, codec: Codec, **settings: Any) -> Any:
        raise NotImplementedError("this world compresses nothing")

    def empty(self, shape: Any, dtype: Any) -> Array:
        return np.full(shape, np.nan, dtype)  # undefined, and seen if it is ever used

    def broadcast(self, x: Array, *, root: int = 0, out: Any = None) -> Any:
        return x
