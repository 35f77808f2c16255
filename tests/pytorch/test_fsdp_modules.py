"""What torch modules do: share, freeze and skip parameters, run twice, recompute, and return whatever they like."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.torch_models import Chain, Part, X, assert_close, check_gradients, data, loss_of, made, net, wrap
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from unit.parallel.sharding.models import chosen, strategies

from paceline._group import Group
from paceline.config import Config
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline.testing import run_ranks
from paceline.torch import FSDP

pytestmark = pytest.mark.needs(what="torch")

HASTY = Config(step_timeout=5.0)
each_strategy = pytest.mark.parametrize("name", strategies(2))


@each_strategy
def test_units_may_run_twice_in_a_pass(name: str) -> None:
    class Twice(Chain):
        def forward(self, x: Any) -> Any:
            return super().forward(super().forward(x)) + x

    check_gradients(Twice, name)


@each_strategy
def test_units_may_run_in_parallel_branches(name: str) -> None:
    """One input, several units of it; and a unit whose output is used by several."""

    class Branches(Chain):
        def forward(self, x: Any) -> Any:
            x = self.parts[0](x)
            return self.parts[1](x) * self.parts[2](x) + x

    check_gradients(Branches, name)


class Recomputing(Chain):
    reentrant = False

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Recomputing):
    reentrant = True


class Inner(Part):
    def forward(self, x: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputingInside(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Inner() for _ in range(3))


@each_strategy
@pytest.mark.parametrize(
    ("make", "leaf"),
    [
        (Recomputing, False),
        (Recomputing, True),
        (RecomputingInside, False),
        (RecomputingInside, True),
        (Reentrant, True),
    ],
)
def test_activation_checkpointing(make: Any, name: str, leaf: bool) -> None:
    def call(model: Any, x: Any, number: int) -> Any:
        return (model(x.clone().requires_grad_(leaf)) ** 2).mean()

    check_gradients(make, name, call=call, kinds=(Part, Inner))


@each_strategy
def test_units_may_be_skipped_in_a_pass(name: str) -> None:
    """Another unit is left out each time, and one always is."""

    class Skipping(Chain):
        skip: tuple[int, ...] = ()

        def forward(self, x: Any) -> Any:
            for number, part in enumerate(self.parts):
                x = x if number in self.skip else part(x)
            return x

    def call(model: Any, x: Any, number: int) -> Any:
        getattr(model, "module", model).skip = ((1, 3), (2, 3), (3,))[number]
        return (model(x) ** 2).mean()

    check_gradients(
        lambda: Skipping(4), name, call=call, steps=3, unused=("parts.3.linear.weight", "parts.3.linear.bias")
    )


@each_strategy
def test_parameters_unused_on_one_rank_get_gradients(name: str) -> None:
    class Sometimes(Part):
        def forward(self, x: Any) -> Any:
            return torch.tanh(self.linear(x)) if x[0, 0] < 0 else torch.tanh(F.linear(x, self.linear.weight))

    def rank(group: Group) -> Any:
        model = FSDP(made(lambda: nn.Sequential(Part(), Sometimes(), Part())), group, auto_wrap=Part, **chosen(name))
        x = torch.full((1, 6), -1.0 if group.rank else 1.0)
        model.module[0].register_forward_hook(lambda module, args, out: x + 0 * out)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        return {path: None if p.grad is None else p.grad.numel() for path, p in model.named_parameters()}

    for found in run_ranks(2, rank, config=HASTY):
        assert None not in found.values()


@each_strategy
def test_frozen_parameters(name: str) -> None:
    def make() -> Any:
        model = Chain()
        for p in [*model.parts[1].parameters(), model.parts[0].linear.bias]:
            p.requires_grad_(False)
        return model

    unused = ("parts.0.linear.bias", "parts.1.linear.weight", "parts.1.linear.bias")
    check_gradients(make, name, unused=unused)


@each_strategy
def test_freezing_between_steps(name: str) -> None:
    def call(model: Any, x: Any, number: int) -> Any:
        parameters = dict(model.named_parameters())
        parameters["parts.0.linear.weight"].requires_grad_(number == 1)
        parameters["parts.2.linear.bias"].requires_grad_(number == 0)
        return (model(x) ** 2).mean()

    check_gradients(Chain, name, call=call)


@each_strategy
def test_tied_parameters_of_one_unit(name: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 6)
            self.part = Part()
            self.head = nn.Linear(6, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Any) -> Any:
            return self.head(self.part(self.embed((x.abs() * 4).long().sum(dim=1) % 5)))

    check_gradients(Tied, name)

    def rank(group: Group) -> Any:
        model = FSDP(made(Tied), group, auto_wrap=Part, **chosen(name))
        state = model.state_dict()
        fresh = FSDP(made(Tied, seed=1), group, auto_wrap=Part)
        fresh.load_state_dict(state)
        assert_close(fresh.state_dict(), state)
        return state

    bare = made(Tied, seed=1)
    bare.load_state_dict(run_ranks(2, rank)[0])
    assert_close(bare.state_dict(), made(Tied).state_dict())


def test_parameters_tied_across_units_are_refused() -> None:
    def rank(group: Group) -> None:
        first, second = Part(), Part()
        second.linear.weight = first.linear.weight
        with pytest.raises(UnsupportedOp, match="tied"):
            FSDP(nn.Sequential(first, second), group, auto_wrap=Part)

    run_ranks(1, rank)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x.reshape(-1, 2, 6) if len(x) % 2 == 0 else x[:, None])


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(1, 3, 3, padding=1)
        self.recur = nn.GRU(3, 4, batch_first=True)
        self.embed = nn.Embedding(4, 4, sparse=True)

    def forward(self, x: Any) -> Any:
        y, _ = self.recur(self.convolve(x[:, None]).transpose(1, 2))
        return y + self.embed(torch.arange(6) % 4)


@each_strategy
@pytest.mark.parametrize("make", [Attending, Convolving])
def test_attention_convolution_and_recurrent_layers(make: Any, name: str) -> None:
    if make is Convolving:  # sparse gradients arrive dense, as FSDP cuts them
        check_dense = copy.deepcopy(made(make).double())
        check_dense.embed.sparse = False
        check_gradients(lambda: copy.deepcopy(check_dense).float(), name, kinds=(nn.Conv1d, nn.GRU))
        return
    check_gradients(make, name, kinds=(nn.TransformerEncoderLayer,))


def test_sparse_gradients_arrive_dense() -> None:
    def rank(group: Group) -> Any:
        model = FSDP(made(lambda: nn.Embedding(4, 3, sparse=True)), group)
        model(torch.tensor([group.rank, 3])).sum().backward()
        return model.sharded.padded_gradients()["weight"]

    first, second = run_ranks(2, rank)
    np.testing.assert_array_equal((first + second)[:, 0], [0.5, 0.5, 0, 1.0])


def test_buffers_of_rank_0_are_broadcast() -> None:
    def rank(group: Group) -> Any:
        model = made(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)).double())
        fsdp = FSDP(model, group)
        fsdp(X[2 * group.rank : 2 * group.rank + 2] + group.rank).sum().backward()
        return model[0].running_mean.clone(), fsdp.state_dict()

    (first, state), (second, _) = run_ranks(2, rank)
    assert torch.equal(first, second)
    assert torch.equal(state["0.running_mean"], first)
    assert int(state["0.num_batches_tracked"]) == 1


def test_misuse_of_the_wrapper_is_refused() -> None:
    def rank(group: Group) -> None:
        model = wrap(net(), group, "full")
        x, _ = data(2)
        with pytest.raises(StepOrderError, match="wraps a part"):
            model.module.blocks[0](torch.ones(2, 7, dtype=torch.float64))
        with pytest.raises(UnsupportedOp, match="before it is wrapped"):
            model.float()
        with pytest.raises(StepOrderError, match="before it is wrapped"):
            copy.deepcopy(model)
        with pytest.raises(UnsupportedOp, match="float32"):
            FSDP(nn.Linear(2, 2).half(), group)
        with pytest.raises(UnsupportedOp, match="on meta"):
            FSDP(nn.Linear(2, 2, device="meta"), group)
        with pytest.raises(SizeMismatch, match="missing"):
            model.load_state_dict({})
        model(x)

    run_ranks(1, rank)


def test_models_that_differ_between_ranks_raise_size_mismatch() -> None:
    def rank(group: Group) -> None:
        model = FSDP(nn.Linear(3, 2 + group.rank), group)
        with pytest.raises(SizeMismatch, match=r"'weight' float32 \[3, 3\]"):
            model(torch.ones(1, 3))

    run_ranks(2, rank)


def test_calling_the_bare_module_returns_nan() -> None:
    """What does not go through the wrapper finds no values, and says so by its result."""

    def rank(group: Group) -> None:
        model = FSDP(made(Chain), group)
        model.prepare()
        assert torch.isnan(model.module(X.float())).all()
        assert loss_of(model(X.float()), torch.zeros(4, 6)).isfinite()

    run_ranks(2, rank)
