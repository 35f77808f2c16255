"""A small network with parameters of awkward sizes, the strategies by name, and one process's training of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from unit.parallel.helpers import Array, Weights

from paceline import nn
from paceline._parallel import FSDP, Parameter, ShardingStrategy

INPUTS, OUTPUTS = 5, 2
Gradients = dict[str, Array | None]


def strategies(world: int) -> list[str]:
    """Every strategy that a world can have, by name; "hybrid2" has nodes of two ranks."""
    nodes = sorted({n for n in (1, 2, world) if world % n == 0})
    return ["full", "grad", "none", *(f"hybrid{n}" for n in nodes)]


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


def joined(ranks: Sequence[Gradients], copies: int) -> Gradients:
    """Whole gradients from what `padded_gradients` gave on each rank, where so many ranks hold the same part."""
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
