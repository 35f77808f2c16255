"""A small torch network with parameters of awkward sizes, and one process's training of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from unit.parallel.sharding.models import HASTY, chosen, joined

from paceline._group import Group
from paceline.testing import run_ranks
from paceline.torch import FSDP

__all__ = [
    "X",
    "Block",
    "Case",
    "Chain",
    "Net",
    "Part",
    "assert_close",
    "assert_same_gradients",
    "check_gradients",
    "data",
    "loss_of",
    "made",
    "net",
    "one_after_the_other",
    "rows_of",
    "train",
    "wrap",
]

_LOCK = threading.Lock()
"""torch's random numbers are one for the process, and ranks are threads."""


def made(make: Callable[[], Any], seed: int = 0) -> Any:
    """What `make` makes, always the same for one seed."""
    with _LOCK, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


class Block(nn.Module):
    """y = gain * tanh(x W' + b) + x: it has a way around its weights; and a parameter without elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Any) -> Any:
        return x + self.gain * torch.tanh(self.linear(x)) + self.empty.sum()


class Net(nn.Module):
    """5 -> 7, three blocks, a norm, 7 -> 2; with a buffer that counts calls, and one that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.leave = nn.Linear(7, 2, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x))


def net(seed: int = 0, dtype: Any = torch.float64) -> Net:
    return made(lambda: Net().to(dtype), seed)  # type: ignore[no-any-return]


def wrap(module: Any, group: Any, name: str, units: str = "blocks", **settings: Any) -> Any:
    """One unit ("one"), one for each block ("blocks"), or for each block and the linear inside ("nested")."""
    kinds = {"one": (), "blocks": (Block,), "nested": (Block, nn.Linear)}[units]
    return FSDP(module, group, auto_wrap=kinds, **chosen(name), **settings)


def data(count: int, dtype: Any = torch.float64) -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    x, t = rng.standard_normal((count, 5)), rng.uniform(-0.8, 0.8, (count, 2))
    return torch.from_numpy(x).to(dtype), torch.from_numpy(t).to(dtype)


def rows_of(rank: int, world: int, count: int) -> Any:
    """Shares that are not of one size."""
    return np.array_split(np.arange(count), world)[rank]


def loss_of(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).sum(dim=1).mean()


def train(model: Any, rows: Any, *, kind: str = "adamw", steps: int = 4, count: int = 22) -> list[float]:
    """Trains it on some of the samples; the losses."""
    x, t = data(count, next(iter(model.parameters())).dtype)
    make = {"adamw": lambda p: torch.optim.AdamW(p, lr=0.01), "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
    optimizer = make[kind](model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(x[rows]), t[rows])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def assert_close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Dicts of tensors, or None, that are equal to a tolerance."""
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        assert (found[path] is None) == (values is None), path
        if values is not None:
            torch.testing.assert_close(
                found[path], values, rtol=tolerance, atol=tolerance, msg=lambda m, p=path: f"{p}: {m}"
            )


def assert_same_gradients(ranks: Sequence[Any], name: str, reference: Any, tolerance: float = 1e-12) -> None:
    """What `padded_gradients` gave on each rank under a strategy are the gradients of a module in one process."""
    found = {path: None if g is None else torch.from_numpy(g) for path, g in joined(ranks, name).items()}
    assert_close(found, {path: p.grad for path, p in reference.named_parameters()}, tolerance)


X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
"""What `Part` and `Chain` are called with."""


class Part(nn.Module):
    """Rotates and bends; what every test wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.linear(x))


def one_after_the_other(parts: Any, x: Any) -> Any:
    for part in parts:
        x = part(x)
    return x


class Chain(nn.Module):
    """Parts, one after the other.

    Args:
        flow: of (parts, x) to the output, for another way through them.
        count: number of parts.
        part: makes one.
    """

    def __init__(self, flow: Callable[[Any, Any], Any] = one_after_the_other, count: int = 3, part: Any = Part) -> None:
        super().__init__()
        self.flow = flow
        self.parts = nn.ModuleList(part() for _ in range(count))

    def forward(self, x: Any) -> Any:
        return self.flow(self.parts, x)


class Case(NamedTuple):
    """A model whose gradients are compared with those of one process.

    Attributes:
        make: makes the module.
        call: of (model, x, number of the step) to the loss.
        steps: forward and backward passes; gradients add up.
        kinds: what is a unit.
        unused: paths that get no gradient.
    """

    make: Callable[[], Any]
    call: Callable[[Any, Any, int], Any] = lambda model, x, number: (model(x) ** 2).mean()
    steps: int = 2
    kinds: Any = Part
    unused: tuple[str, ...] = ()


def check_gradients(case: Case, name: str) -> None:
    """Gradients of two ranks with two rows each are those of one process with all four. `name` is the strategy's."""
    reference = made(case.make).double()
    for number in range(case.steps):
        case.call(reference, X, number).backward()

    def rank(group: Group) -> Any:
        model = FSDP(made(case.make).double(), group, auto_wrap=case.kinds, **chosen(name))
        for number in range(case.steps):
            case.call(model, X[2 * group.rank : 2 * group.rank + 2], number).backward()
        return model.sharded.padded_gradients()

    ranks = run_ranks(2, rank, config=HASTY)
    assert {path for path, gradient in ranks[0].items() if gradient is None} == set(case.unused)
    assert_same_gradients(ranks, name, reference)
