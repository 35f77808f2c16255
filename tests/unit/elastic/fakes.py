"""A framework that is not there, and modules of every kind: what training states consist of in these tests."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import paceline

FRAMEWORK = "fakeframe"


class Tensor:
    """An array of a framework: its memory is seen through `detach().numpy()`."""

    __module__ = FRAMEWORK + ".tensors"

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)
        self.grad: Any = None

    def detach(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self._values


@contextmanager
def framework() -> Iterator[None]:
    """As if it had been imported."""
    module = types.ModuleType(FRAMEWORK)
    module.from_numpy = Tensor  # type: ignore[attr-defined]
    sys.modules[FRAMEWORK] = module
    try:
        yield
    finally:
        del sys.modules[FRAMEWORK]


class ForeignModel:
    """A module of that framework."""

    def __init__(self) -> None:
        self.weight = Tensor(np.arange(6.0).reshape(2, 3))
        self.running = Tensor(np.zeros(3))

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return [("weight", self.weight), ("tied", self.weight)]

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return [("running", self.running)]


class ForeignOptimizer:
    """One with a gate: `step` and `zero_grad`."""

    def __init__(self, model: ForeignModel) -> None:
        self.model = model
        self.momentum = Tensor(np.zeros((2, 3)))
        self.table = np.zeros(2)
        self.param_groups = [{"params": [model.weight], "lr": 0.1, "scale": Tensor(np.ones(()))}]

    def step(self) -> None:
        self.momentum._values += 1
        self.model.weight._values -= self.momentum._values

    def zero_grad(self) -> None:
        self.model.weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"momentum": self.momentum}}, "groups": [{"lr": 0.1, "params": (0,)}], "table": self.table}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        momentum = saved["state"][0]["momentum"]
        assert isinstance(momentum, Tensor)
        assert isinstance(saved["table"], np.ndarray)
        if momentum.numpy().shape != (2, 3):
            raise RuntimeError("size mismatch")
        self.momentum, self.table = momentum, saved["table"]


class Counter:
    """Anything with a state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.value = saved["value"]


class Normed:
    """A NumPy module with a buffer that its forward changes, and a parameter under two paths."""

    def __init__(self, seed: int = 0, width: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.linear = paceline.nn.Linear(4, width, rng=rng, dtype=np.float64)
        self.mean = np.zeros(4)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        yield from self.linear.named_parameters()
        yield "tied", self.linear.weight

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        yield "mean", self.mean

    def forward(self, x: Any) -> Any:
        self.mean += x.mean(axis=0)
        return self.linear.forward(x)

    def backward(self, dy: Any) -> Any:
        return self.linear.backward(dy)


class Gate:
    """Counts what it is asked."""

    def __init__(self, refuse: Callable[[], None] = lambda: None) -> None:
        self.opened = self.spoiled = 0
        self.refuse = refuse

    def open(self, optimizer: object) -> None:
        self.refuse()
        self.opened += 1

    def spoil(self) -> None:
        self.spoiled += 1

    def changed(self) -> None:
        pass
