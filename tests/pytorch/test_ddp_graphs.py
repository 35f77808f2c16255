"""Modules of many kinds: which parameters a backward pass uses, how often, and in what layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch.models import X, built, check, gradients, loss_of, mlp, samples, whole
from torch.utils.checkpoint import checkpoint

import paceline
import paceline.torch
from paceline._group import Group
from paceline.errors import StepOrderError
from paceline.testing import local_groups, run_ranks

pytestmark = pytest.mark.needs(what="torch")

DDP = paceline.torch.DDP
cross_entropy = torch.nn.functional.cross_entropy


class Branches(torch.nn.Module):  # type: ignore[misc]
    """Three layers, of which a pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(5, 3, dtype=torch.float64) for name in "abc"})

    def forward(self, x: Any, use: str) -> Any:
        return sum(self.layers[name](x) for name in use)


@pytest.mark.parametrize("static", [False, True])
def test_only_parameters_unused_by_all_ranks_keep_no_gradient(static: bool) -> None:
    """One that only rank 0 uses gets its part everywhere; one that nobody uses keeps no gradient."""
    x, t = samples()

    def run(group: Group) -> Any:
        model = DDP(built(Branches), group, bucket_mb=1e-6, static_graph=static)
        for _ in range(3):
            model.zero_grad()
            cross_entropy(model(x, "ab" if group.rank == 0 else "a"), t).backward()
        return gradients(model)

    model = built(Branches)
    ((cross_entropy(model(x, "ab"), t) + cross_entropy(model(x, "a"), t)) / 2).backward()
    ranks = run_ranks(2, run)
    assert ranks[0]["layers.c.weight"] is None
    assert ranks[0]["layers.b.weight"] is not None
    for found in ranks:
        torch.testing.assert_close(found, gradients(model))


def test_graphs_may_differ_between_passes_and_ranks() -> None:
    x, t = samples()
    uses = [("a", "b"), ("abc", "c"), ("b", "bc"), ("c", "a")]

    def run(group: Group) -> Any:
        model = DDP(built(Branches), group, bucket_mb=1e-6)
        for use in uses:
            cross_entropy(model(x, use[group.rank]), t).backward()
        return gradients(model)

    model = built(Branches)
    for use in uses:
        (sum(cross_entropy(model(x, each), t) for each in use) / 2).backward()
    check(run, gradients(model))


def test_a_changed_static_graph_raises_step_order_error() -> None:
    x, t = samples()
    model = DDP(Branches(), local_groups(1)[0], bucket_mb=1e-6, static_graph=True)
    cross_entropy(model(x, "a"), t).backward()
    with pytest.raises(StepOrderError, match="uses the parameter more often"):
        cross_entropy(model(x, "ac"), t).backward()
    assert all(p.grad is None for p in model.parameters())
    cross_entropy(model(x, "a"), t).backward()
    assert model.module.layers["a"].weight.grad is not None


def test_a_detached_loss_contributes_zero_gradients() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        loss = loss_of(model)
        model.backward(loss if group.rank == 0 else loss.detach(), 1.0)
        return gradients(model)

    model = mlp()
    (loss_of(model) / 2).backward()
    check(run, gradients(model))


class Tied(torch.nn.Module):  # type: ignore[misc]
    """A layer that is used twice, by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 5, dtype=torch.float64)
        self.second = self.first
        self.last = torch.nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.last(self.second(torch.tanh(self.first(x))))


class Checkpointed(torch.nn.Module):  # type: ignore[misc]
    """Recomputes its first half in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Any) -> Any:
        return self.inner[3](checkpoint(self.inner[:3], x, use_reentrant=False))


class Frozen(torch.nn.Module):  # type: ignore[misc]
    """Its first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.inner[0].requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("make", [Tied, Checkpointed, Frozen])
def test_tied_checkpointed_and_frozen_modules(make: Any) -> None:
    def run(group: Group) -> Any:
        model = DDP(built(make), group, bucket_mb=300 / 2**20)
        for batch in range(3):
            loss_of(model, group.rank, batch).backward()
        return gradients(model)

    alone = built(make)
    for batch in range(3):
        ((loss_of(alone, 0, batch) + loss_of(alone, 1, batch)) / 2).backward()
    check(run, gradients(alone))


def test_reentrant_checkpoints_are_refused() -> None:
    model = DDP(mlp(), local_groups(1)[0])
    model.prepare()
    x = X.clone().requires_grad_()
    y = model.module[3](checkpoint(model.module[:3], x, use_reentrant=True))
    with pytest.raises(StepOrderError, match="use_reentrant=True"):
        y.sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_an_unfrozen_layer_gets_gradients() -> None:
    def run(group: Group) -> Any:
        module = mlp()
        module[0].requires_grad_(False)
        model = DDP(module, group)
        loss_of(model, group.rank, 0).backward()
        assert module[0].weight.grad is None
        module[0].requires_grad_(True)
        model.zero_grad()
        loss_of(model, group.rank, 1).backward()
        return gradients(model)

    check(run, whole(1))


def test_channels_last_and_sparse_gradients() -> None:
    class Odd(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(6, 4, sparse=True)
            self.conv = torch.nn.Conv2d(4, 2, 2).to(memory_format=torch.channels_last)

        def forward(self, x: Any) -> Any:
            return self.conv(self.words(x).permute(0, 3, 1, 2)).square().mean()

    inputs = torch.arange(2 * 2 * 9).reshape(2, 2, 3, 3) % 6

    def run(group: Group) -> Any:
        model = DDP(built(Odd), group)
        for _ in range(2):
            model(inputs[group.rank]).backward()
        return gradients(model)

    alone = built(Odd)
    for _ in range(2):
        ((alone(inputs[0]) + alone(inputs[1])) / 2).backward()
    check(run, {path: g.to_dense() for path, g in gradients(alone).items()})
