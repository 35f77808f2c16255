"""Small models and their data, for one process and for ranks that share the work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import paceline
from paceline._group import Group
from paceline.testing import run_ranks

N = 50
"""Samples."""

Weights = dict[str, Any]

_random = threading.RLock()


def built(make: Callable[[], Any], seed: int = 0) -> Any:
    """The module that a seed gives; ranks that are threads have one source of randomness."""
    with _random:
        torch.manual_seed(seed)
        return make()


def mlp(seed: int = 0, dtype: Any = torch.float64) -> Any:
    """A small classifier."""
    nn = torch.nn
    return built(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).to(dtype), seed)


def samples(dtype: Any = torch.float64) -> tuple[Any, Any]:
    """Inputs, shape [N, 5], and labels, shape [N]."""
    rng = np.random.default_rng(1)
    return torch.from_numpy(rng.standard_normal((N, 5))).to(dtype), torch.from_numpy(rng.integers(0, 3, N))


def weights(module: Any) -> Weights:
    """A copy of all that a module's state has."""
    return {path: tensor.detach().clone() for path, tensor in module.state_dict().items()}


def gradients(module: Any) -> Weights:
    """A copy of all gradients."""
    return {path: None if p.grad is None else p.grad.clone() for path, p in module.named_parameters()}


def train_alone(module: Any, make: Callable[[Any], Any], sampler: paceline.ElasticSampler, steps: int) -> Weights:
    """What one process makes of it."""
    x, t = samples(next(module.parameters()).dtype)
    optimizer = make(module.parameters())
    for step in range(steps):
        indices = sampler.batch(step)
        loss = torch.nn.functional.cross_entropy(module(x[indices]), t[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(module)


def train_ranks(
    group: Group,
    module: Any,
    make: Callable[[Any], Any],
    sampler: paceline.ElasticSampler,
    steps: int,
    **settings: Any,
) -> Weights:
    """The same on one of several ranks."""
    x, t = samples(next(module.parameters()).dtype)
    model = paceline.torch.DDP(module, group, **settings)
    optimizer = make(model.parameters())
    for step in range(steps):
        indices, weight = sampler.share(step, group.rank, group.size)
        loss = torch.nn.functional.cross_entropy(model(x[indices]), t[indices])
        optimizer.zero_grad()
        model.backward(loss, weight)
        optimizer.step()
    return weights(model)


def assert_same_bits(ranks: list[Weights]) -> None:
    """All ranks hold the same."""
    for rank, other in enumerate(ranks):
        assert ranks[0].keys() == other.keys()
        for path, values in ranks[0].items():
            same = values is other[path] if values is None else torch.equal(values, other[path])
            assert same, f"{path} of rank {rank} differs from rank 0's"


X, T = samples()


def loss_of(model: Any, rank: int = 0, batch: int = 0) -> Any:
    """The mean loss over 8 samples that belong to a rank and batch."""
    start = (rank * 8 + batch * 16) % 40
    return torch.nn.functional.cross_entropy(model(X[start : start + 8]), T[start : start + 8])


def whole(*batches: int, world: int = 2) -> Any:
    """What one process has after backward passes over these batches, each the mean over all ranks' samples."""
    model = mlp()
    for batch in batches:
        (sum(loss_of(model, rank, batch) for rank in range(world)) / world).backward()
    return gradients(model)


def check(run: Any, expected: Any, world: int = 2) -> None:
    """All ranks end with the same gradients, the expected ones."""
    ranks = run_ranks(world, run)
    assert_same_bits(ranks)
    torch.testing.assert_close(ranks[0], expected)
