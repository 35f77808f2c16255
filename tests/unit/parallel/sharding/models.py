"""What FSDP is tested with: strategies by name, models by name, and training that must be that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import DTypeLike
from unit.parallel.helpers import Array, Branches, Weights, scale

from paceline import nn
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._parallel import FSDP, Parameter, ShardingStrategy
from paceline._parallel._parameter import HasParameters, parameters_of
from paceline.config import Config
from paceline.optim import SGD, Adam, Optimizer
from paceline.testing import run_ranks

INPUTS, OUTPUTS = 5, 2
SAMPLES, BATCH = 23, 11  # batches of 11, 11 and 1: shares are uneven, and some ranks get no sample
Gradients = dict[str, Array | None]

ONE = np.ones((1, 2))
HASTY = Config(step_timeout=5.0)
"""Where a defect may leave a rank waiting."""


def strategies(world: int) -> list[str]:
    """Every strategy that a world can have, by name; "hybrid2" has nodes of two ranks."""
    nodes = sorted({n for n in (1, 2, world) if world % n == 0})
    return ["full", "grad", "none", *(f"hybrid{n}" for n in nodes)]


def cases(*worlds: int) -> list[tuple[int, str]]:
    """Each world with every strategy that it can have."""
    return [(world, name) for world in worlds for name in strategies(world)]


each_strategy = pytest.mark.parametrize("name", strategies(2))


def chosen(name: str) -> dict[str, Any]:
    """The arguments of FSDP."""
    plain = {
        "full": ShardingStrategy.FULL_SHARD,
        "grad": ShardingStrategy.SHARD_GRAD_OP,
        "none": ShardingStrategy.NO_SHARD,
    }
    if name in plain:
        return {"strategy": plain[name]}
    return {"strategy": ShardingStrategy.HYBRID_SHARD, "intra_node_size": int(name.removeprefix("hybrid"))}


def shard_size(name: str, world: int) -> int:
    """How many ranks hold one copy between them."""
    if name.startswith("hybrid"):
        return int(name.removeprefix("hybrid"))
    return 1 if name == "none" else world


class Layer:
    """y = tanh(gain * (x W' + b)); there is also a parameter without elements. `act(when)` is called in each pass."""

    def __init__(self, inputs: int, outputs: int, rng: np.random.Generator, dtype: DTypeLike, other: DTypeLike) -> None:
        self.weight = Parameter((rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(dtype))
        self.empty = Parameter(np.zeros((0, 3), dtype))
        self.bias = Parameter((rng.standard_normal(outputs) / 4).astype(other))
        self.gain = Parameter(np.ones(1, other))
        self.act: Callable[[str], None] = lambda when: None
        self._kept: tuple[Array, Array, Array] | None = None

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name in ("weight", "empty", "bias", "gain"):
            yield name, getattr(self, name)

    def forward(self, x: Array) -> Array:
        self.act("forward")
        z = x @ self.weight.data.T + self.bias.data
        y: Array = np.tanh(self.gain.data * z)
        self._kept = x, z, y
        return y

    def backward(self, dy: Array) -> Array:
        assert self._kept is not None
        x, z, y = self._kept
        dz = dy * (1 - y * y)
        self.gain.accumulate((dz * z).sum(keepdims=True).reshape(1))
        dz = dz * self.gain.data
        self.bias.accumulate(dz.sum(axis=0))
        self.empty.accumulate(np.zeros((0, 3)))
        self.act("backward")
        self.weight.accumulate(dz.T @ x)
        dx: Array = dz @ self.weight.data
        return dx


def layers(seed: int = 0, dtype: DTypeLike = np.float64, other: DTypeLike | None = None) -> list[Layer]:
    """5 -> 7 -> 3 -> 2: sizes 35, 0, 7, 1; 21, 0, 3, 1; 6, 0, 2, 1."""
    rng = np.random.default_rng(seed)
    sizes = [(INPUTS, 7), (7, 3), (3, OUTPUTS)]
    return [Layer(i, o, rng, dtype, dtype if other is None else other) for i, o in sizes]


def net(seed: int = 0, dtype: DTypeLike = np.float64, other: DTypeLike | None = None) -> nn.Sequential:
    """Without a wrapper."""
    return nn.Sequential(*layers(seed, dtype, other))


def wrap(parts: Sequence[Any], group: Any, units: str, **settings: Any) -> FSDP:
    """One unit ("one"), a unit for each layer ("each"), or the middle left to the outermost ("some")."""
    own = {"one": (), "each": range(len(parts)), "some": (0, 2)}[units]
    model = nn.Sequential(*(FSDP(part, group, **settings) if n in own else part for n, part in enumerate(parts)))
    return FSDP(model, group, **settings)


def inside(module: Any) -> dict[str, Parameter]:
    """The module's own parameters by path, whole ones, whatever is wrapped in it; not the pieces."""
    while isinstance(module, FSDP):
        module = module.module
    if not isinstance(module, nn.Sequential):
        return dict(module.named_parameters())
    return {f"{n}.{path}": p for n, part in enumerate(module.modules) for path, p in inside(part).items()}


def holding(module: Any) -> list[str]:
    """Paths of the parameters that have values now, though this rank keeps a part of them only."""
    flats = [flat for part in module._sharded.parts() for flat in part.unit.flats]
    spread = {id(p) for flat in flats if flat.is_spread for p in flat.parameters}
    return [path for path, p in inside(module).items() if id(p) in spread and p._data is not None]


def data(count: int, dtype: DTypeLike = np.float64) -> tuple[Array, Array]:
    """Inputs and targets."""
    rng = np.random.default_rng(5)
    return rng.standard_normal((count, INPUTS)).astype(dtype), rng.uniform(-0.8, 0.8, (count, OUTPUTS)).astype(dtype)


def squared(y: Array, t: Array) -> tuple[float, Array]:
    """Mean over the batch of the squared error of a sample, and its gradient by y."""
    return float(((y - t) ** 2).sum(axis=1).mean()), 2 * (y - t) / len(y)


def joined(ranks: Sequence[Gradients], name: str) -> Gradients:
    """Whole gradients from what `padded_gradients` gave on each rank under a strategy."""
    copies = len(ranks) // shard_size(name, len(ranks))
    for other in ranks:
        assert {k for k, g in other.items() if g is None} == {k for k, g in ranks[0].items() if g is None}
    return {path: None if g is None else sum(r[path] for r in ranks) / copies for path, g in ranks[0].items()}  # type: ignore[misc]


def same_bits(states: Sequence[Weights]) -> None:
    """Every rank holds what rank 0 holds."""
    for rank, state in enumerate(states):
        assert state.keys() == states[0].keys()
        for path, values in states[0].items():
            assert values.tobytes() == state[path].tobytes(), f"{path} of rank {rank} differs from rank 0's"


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Dicts of arrays, or None, that are equal to a tolerance, relative and absolute."""
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        assert (found[path] is None) == (values is None), f"{path}: {found[path]} for {values}"
        if values is not None:
            assert found[path].shape == values.shape
            np.testing.assert_allclose(found[path], values, rtol=tolerance, atol=tolerance, err_msg=path)


class Wrapping:
    """A module around another one, without parameters of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.inner.named_parameters()

    def forward(self, x: Array) -> Array:
        return self.inner.forward(x)  # type: ignore[no-any-return]

    def backward(self, dy: Array) -> Array:
        return self.inner.backward(dy)  # type: ignore[no-any-return]


class Ordered(nn.Sequential):
    """Runs its modules in the order that `use` has, and calls `last` at the end."""

    use: tuple[int, ...] = ()

    def forward(self, x: Any) -> Any:
        for number in self.use:
            x = self.modules[number].forward(x)
        self.last()
        return x

    def backward(self, dy: Any) -> Any:
        for number in reversed(self.use):
            dy = self.modules[number].backward(dy)
        return dy

    def last(self) -> None:
        """Nothing."""


class ByTurns(Ordered):
    """Three scales, of which each pass leaves out some, or runs them in another order."""

    TURNS = ((0, 2), (0, 1, 2), (2, 1, 0), (1,))

    def __init__(self, wrap: Callable[[Any], Any], size: int) -> None:
        super().__init__(*(wrap(Branches("a", a=scale(*[1.0 + n] * size))) for n in range(3)))
        self.passes = 0

    def forward(self, x: Any) -> Any:
        self.use = self.TURNS[self.passes % 4]
        self.passes += 1
        return super().forward(x)


def frozen(layer: Layer) -> Layer:
    for _, p in layer.named_parameters():
        p.requires_grad = False
    return layer


def tied(size: int) -> Branches:
    """y = w * w * x."""
    shared = scale(*np.linspace(0.5, 1.5, size))
    return Branches("ab", a=shared, b=shared)


MODELS: dict[str, Callable[[Callable[[Any], Any], Any, Any, Any], Any]] = {
    "one unit": lambda wrap, *layers: wrap(nn.Sequential(*layers)),
    "some layers in units": lambda wrap, a, b, c: wrap(nn.Sequential(wrap(a), b, wrap(c))),
    "each layer in a unit": lambda wrap, *layers: wrap(nn.Sequential(*map(wrap, layers))),
    "units in units in units": lambda wrap, a, b, c: wrap(nn.Sequential(wrap(nn.Sequential(a, wrap(b))), c)),
    "a unit whose parameters are in units": lambda wrap, a, b, c: wrap(nn.Sequential(a, wrap(Wrapping(wrap(b))), c)),
    "a frozen layer": lambda wrap, a, b, c: wrap(nn.Sequential(frozen(a), wrap(frozen(b)), c)),
    "tied parameters": lambda wrap, a, b, c: wrap(nn.Sequential(a, wrap(tied(7)), b, c)),
    "units by turns": lambda wrap, a, b, c: wrap(nn.Sequential(a, ByTurns(wrap, 7), b, c)),
    "a unit without parameters": lambda wrap, a, b, c: wrap(nn.Sequential(nn.Sequential(a, wrap(nn.ReLU())), b, c)),
}
"""A function that makes a model of three layers, given another that wraps a module in a unit."""


OPTIMIZERS: dict[str, Callable[[HasParameters], Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(Adam, lr=0.01),
}


class Case(NamedTuple):
    """Training that is compared with that of one process.

    Attributes:
        world: number of ranks.
        name: of the strategy; "hosts" for nodes that are found.
        model: a key of `MODELS`.
        kind: a key of `OPTIMIZERS`.
        dtype: of weights, and of other parameters.
        steps: number of steps.
        tolerance: of losses and weights.
    """

    world: int
    name: str
    model: str
    kind: str
    dtype: tuple[str, str] = ("float64", "float64")
    steps: int = 5
    tolerance: float = 1e-12


class Result(NamedTuple):
    """The mean loss of all samples in each step; weights, and paths that the optimizer has a state of, in the end."""

    losses: list[float]
    weights: Weights
    trained: list[str]


def result(losses: list[float], weights: Weights, optimizer: Optimizer) -> Result:
    return Result(losses, weights, sorted(optimizer.state_dict()["state"]))


def alone(module: Any, kind: str, dtype: str = "float64", steps: int = 5) -> Result:
    """One process without Paceline."""
    x, t = data(SAMPLES, dtype)
    sampler, optimizer, losses = ElasticSampler(SAMPLES, BATCH, seed=3), OPTIMIZERS[kind](module), []
    for step in range(steps):
        indices = sampler.batch(step)
        loss, dy = squared(module.forward(x[indices]), t[indices])
        optimizer.zero_grad()
        module.backward(dy)
        optimizer.step()
        losses.append(loss)
    return result(losses, {path: p.data for path, p in parameters_of(module).items()}, optimizer)


def spread(fsdp: FSDP, group: Group, kind: str, dtype: str = "float64", steps: int = 5) -> Result:
    """One of several ranks."""
    x, t = data(SAMPLES, dtype)
    sampler, optimizer, losses = ElasticSampler(SAMPLES, BATCH, seed=3), OPTIMIZERS[kind](fsdp), []
    for step in range(steps):
        indices, weight = sampler.share(step, group.rank, group.size)
        loss, dy = squared(fsdp(x[indices]), t[indices])
        optimizer.zero_grad()
        fsdp.backward(dy, weight)
        optimizer.step()
        losses.append(loss * weight)
    return result(np.asarray(group.all_reduce(np.array(losses))).tolist(), fsdp.state_dict(), optimizer)


def check(ranks: list[Result], expected: Result, tolerance: float = 1e-12) -> None:
    same_bits([found.weights for found in ranks])
    for found in ranks:
        np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance, atol=tolerance)
        assert found.trained == expected.trained
    close(ranks[0].weights, expected.weights, tolerance)
    if len(ranks) == 1:
        assert ranks[0].losses == expected.losses
        same_bits([expected.weights, ranks[0].weights])


def check_training(case: Case, run: Callable[..., list[Result]] = run_ranks) -> None:
    """Each rank starts from weights of its own; rank 0's must prevail. `run` has the arguments of `run_ranks`."""
    make, (dtype, _) = MODELS[case.model], case.dtype
    hosts = case.name == "hosts"  # all ranks of these groups are in one process: one node, as FULL_SHARD
    settings = {"strategy": ShardingStrategy.HYBRID_SHARD} if hosts else chosen(case.name)

    def rank(g: Group) -> Result:
        fsdp = make(lambda module: FSDP(module, g, **settings), *layers(g.rank, *case.dtype))
        return spread(fsdp, g, case.kind, dtype, case.steps)

    expected = alone(make(lambda module: module, *layers(0, *case.dtype)), case.kind, dtype, case.steps)
    check(run(case.world, rank), expected, case.tolerance)
    assert {values.dtype.name for values in expected.weights.values()} == set(case.dtype)
