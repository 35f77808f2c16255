"""Models and cases for tests of FSDP: toys whose every pass can be looked at, and training alone to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline import FSDP, Parameter, ShardingStrategy, nn, optim
from paceline._group import Group
from support.worlds import run_over

__all__ = [
    "CASES",
    "FULL",
    "GRAD_OP",
    "HYBRID",
    "NO_SHARD",
    "ONE",
    "STRATEGIES",
    "T",
    "Toy",
    "X",
    "assert_same",
    "calls",
    "layers",
    "on_ranks",
    "rows",
    "sgd",
    "step",
    "trains_as_alone",
    "units",
    "values",
]

FULL, GRAD_OP, NO_SHARD, HYBRID = ShardingStrategy

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"{s.value} {w}": (w, {"strategy": s}) for s in (FULL, GRAD_OP, NO_SHARD) for w in (1, 2, 3)},
    "hybrid_shard 4": (4, {"strategy": HYBRID, "intra_node_size": 2}),
}
"""World sizes and how to wrap."""
STRATEGIES = ("full_shard 2", "shard_grad_op 2", "no_shard 2", "hybrid_shard 4")

ONE = np.ones(1)
X, T = np.split(np.random.default_rng(3).standard_normal((13, 8)), [5], axis=1)  # no world here divides 13
sgd = partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def on_ranks(*cases: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test out of what each rank does, given its group and the options of the case."""

    def decorate(rank: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("case", cases)
        def test(case: str, link: str) -> None:
            run_over(link, CASES[case][0], partial(rank, **CASES[case][1]))

        return test

    return decorate


class Toy:
    """y = x * sum of its used parameters; keeps its last input in a buffer, and calls a hook when it runs."""

    def __init__(self, hook: Callable[[], None] = lambda: None, **arrays: Any) -> None:
        self.parameters = {path: Parameter(np.array(array, np.float64)) for path, array in arrays.items()}
        self.used = list(self.parameters.values())
        self.seen = np.zeros(1)
        self.hook = hook

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.parameters.items()

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        yield "seen", self.seen

    def forward(self, x: NDArray[Any]) -> NDArray[Any]:
        self.hook()
        self.x, self.seen[:] = x, x[0]
        return x * sum(p.data.sum() for p in self.used)

    def backward(self, dy: NDArray[Any]) -> NDArray[Any]:
        self.hook()
        for parameter in self.used:
            parameter.accumulate(np.full(parameter.shape, (dy * self.x).sum()))
        return dy * sum(p.data.sum() for p in self.used)


def layers(wrap: Callable[[Any], Any] = lambda module: module, seed: int = 0) -> nn.Sequential:
    rng = np.random.default_rng(seed)
    first, second, third = (wrap(nn.Linear(i, o, rng=rng, dtype=np.float64)) for i, o in [(5, 7), (7, 1), (1, 3)])
    return nn.Sequential(first, nn.ReLU(), second, third)


def units(group: Group, seed: int = 0, **options: Any) -> FSDP:
    """Three units, and the one around them, which has no parameters of its own; sizes that no world here divides."""
    return FSDP(layers(lambda module: FSDP(module, group, **options), seed), group, **options)


def rows(group: Group) -> NDArray[Any]:
    return np.array_split(np.arange(13), group.size)[group.rank]


def step(model: Any, samples: Any = slice(None)) -> None:
    model.backward((model.forward(X[samples]) - T[samples]) / len(X[samples]))


def values(model: Any) -> dict[str, NDArray[Any]]:
    return {path: parameter.data.copy() for path, parameter in model.named_parameters()}


def assert_same(found: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, tolerance, tolerance, err_msg=path)


def trains_as_alone(fsdp: FSDP, make: Callable[[Any], optim.Optimizer] = sgd) -> optim.Optimizer:
    """Takes three steps; one process without a wrapper reaches the same with all samples."""
    model = layers()
    single, optimizer = make(model), make(fsdp)
    for _ in range(3):
        for each, samples, its in ((model, slice(None), single), (fsdp, rows(fsdp.group), optimizer)):
            its.zero_grad()
            step(each, samples)
            its.step()
    assert_same(fsdp.state_dict(), values(model), tolerance=0 if fsdp.group.size == 1 else 1e-12)
    return optimizer


def calls(group: Group, since: int = 0) -> list[str]:
    return [entry["operation"] for entry in group.recorder.snapshot()][since:]
