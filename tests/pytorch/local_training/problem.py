"""What is trained locally in tests, and what one process makes of it: written by hand, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from support.elastic.problem import data

__all__ = ["Part", "Reference", "build", "flat", "inner_step", "make_inner"]

_X, _T = data()
_INPUTS, _LABELS = torch.from_numpy(_X), torch.from_numpy(_T)


def build(seed: int, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The model; the same for the same seed, in whichever thread."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(dtype)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape)) / 3))
    return net


def make_inner(net: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW: its state makes a difference."""
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


def inner_step(net: torch.nn.Module, inner: torch.optim.Optimizer, batch: Any) -> None:
    """One step of one worker."""
    inputs = _INPUTS[batch].to(next(net.parameters()).dtype)
    functional.cross_entropy(net(inputs), _LABELS[batch]).backward()
    inner.step()
    inner.zero_grad()


def flat(net: torch.nn.Module) -> Any:
    """All parameters, shape [P], as float64."""
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().double().numpy().copy()


class Part(NamedTuple):
    """What one worker did in a round.

    Attributes:
        worker: who.
        batches: samples of each inner step.
        weight: what they count.
        kept: False if the worker undid the round after all, though the others did not.
    """

    worker: Any
    batches: Sequence[Any]
    weight: float
    kept: bool = True


class Reference:
    """Rounds of local training, one worker after the other.

    Args:
        seed: of the model.
        lr, momentum: of the outer step; 1 and 0 for LocalSGD.
    """

    def __init__(
        self,
        seed: int,
        lr: float = 1.0,
        momentum: float = 0.0,
        make: Callable[[torch.nn.Module], torch.optim.Optimizer] = make_inner,
    ) -> None:
        self._seed, self._lr, self._momentum, self._make = seed, lr, momentum, make
        self.parameters = flat(build(seed))
        self.velocity = np.zeros_like(self.parameters)
        self._workers: dict[Any, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}

    def round(self, parts: Sequence[Part]) -> None:
        """All inner steps of all, and the outer step."""
        change = sum(part.weight * (self.parameters - self._train(part)) for part in parts)
        change = change / sum(part.weight for part in parts)
        self.velocity = self._momentum * self.velocity + change
        self.parameters = self.parameters - self._lr * (change + self._momentum * self.velocity)

    def _train(self, part: Part) -> Any:
        if part.worker not in self._workers:
            net = build(self._seed)
            self._workers[part.worker] = net, self._make(net)
        net, inner = self._workers[part.worker]
        before = copy.deepcopy(inner.state_dict())
        torch.nn.utils.vector_to_parameters(torch.from_numpy(self.parameters.copy()), net.parameters())
        for batch in part.batches:
            inner_step(net, inner, batch)
        if not part.kept:
            inner.load_state_dict(before)
        return flat(net)
