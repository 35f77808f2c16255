"""What torch modules do: share, freeze and skip parameters, run twice, recompute, take and return what they like."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.torch_models import (
    Case,
    Chain,
    Part,
    X,
    assert_close,
    assert_same_gradients,
    check_gradients,
    data,
    loss_of,
    made,
    net,
    one_after_the_other,
    wrap,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from unit.parallel.sharding.models import HASTY, chosen, each_strategy

from paceline._group import Group
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline.testing import run_ranks
from paceline.torch import FSDP

pytestmark = pytest.mark.needs(what="torch")


# Modules, and calls of them.


def recomputed(parts: Any, x: Any, *, reentrant: bool = False) -> Any:
    return one_after_the_other([partial(checkpoint, part, use_reentrant=reentrant) for part in parts], x)


class Recomputing(Part):
    def forward(self, x: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Bending(Part):
    """Changes its input in place."""

    def forward(self, x: Any) -> Any:
        return self.linear(F.relu_(x.mul_(2)))


@dataclass(frozen=True)
class Packed:
    x: Any
    more: tuple[Any, ...] = ()


class Secret:
    """Nobody looks into it."""

    def __init__(self, y: Any) -> None:
        self.y = y


class Packing(Part):
    """Takes and returns nested values."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, given: Any, *, scale: Any) -> Any:  # type: ignore[override]
        return self.pack(super().forward(given["a"][0] * given["b"]) * scale[0])


class Nesting(nn.Module):
    def __init__(self, pack: Any, unpack: Any) -> None:
        super().__init__()
        self.part = Packing(pack)
        self.unpack = unpack

    def forward(self, x: Any) -> Any:
        return self.unpack(self.part({"a": [x, None], "b": 2}, scale=(x * 2, "text")))


class Taking(Part):
    def forward(self, given: Packed) -> Any:  # type: ignore[override]
        return super().forward(given.x) * given.more[0]


def packing(parts: Any, x: Any) -> Any:
    for part in parts:
        x = part(Packed(x, (x, "text")))
    return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.part = Part()
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.part(self.embed((x.abs() * 4).long().sum(dim=1) % 5)))


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
        self.embed = nn.Embedding(4, 4)

    def forward(self, x: Any) -> Any:
        y, _ = self.recur(self.convolve(x[:, None]).transpose(1, 2))
        return y + self.embed(torch.arange(6) % 4)


FROZEN = ("parts.0.linear.bias", "parts.1.linear.weight", "parts.1.linear.bias")


def partly_frozen() -> Any:
    model = Chain()
    for path in FROZEN:
        model.get_parameter(path).requires_grad_(False)
    return model


def with_leaf(model: Any, x: Any, number: int) -> Any:
    return (model(x.clone().requires_grad_()) ** 2).mean()


def twice_backward(model: Any, x: Any, number: int) -> Any:
    loss = (model(x) ** 2).mean()
    loss.backward(retain_graph=True)
    return loss


def skipping(model: Any, x: Any, number: int) -> Any:
    """Another unit is left out each time, and the last one always."""
    used = ((0, 2), (0, 1), (0, 1, 2))[number]
    getattr(model, "module", model).flow = lambda parts, x: one_after_the_other([parts[n] for n in used], x)
    return (model(x) ** 2).mean()


def freezing(model: Any, x: Any, number: int) -> Any:
    parameters = dict(model.named_parameters())
    parameters["parts.0.linear.weight"].requires_grad_(number == 1)
    parameters["parts.2.linear.bias"].requires_grad_(number == 0)
    return (model(x) ** 2).mean()


def evaluating(model: Any, x: Any, number: int) -> Any:
    model.eval()
    with torch.no_grad():
        before = model(x)
    model.train()
    y = model(x)
    torch.testing.assert_close(y.detach(), before)
    return (y**2).mean()


def nested(pack: Any, unpack: Any) -> Case:
    return Case(lambda: nn.Sequential(Part(), Nesting(pack, unpack), Part()))


CASES = {
    "units run twice": Case(lambda: Chain(lambda parts, x: one_after_the_other([*parts, *parts], x) + x)),
    "units in parallel branches": Case(lambda: Chain(lambda parts, x: parts[1](x := parts[0](x)) * parts[2](x) + x)),
    "recomputed units": Case(lambda: Chain(recomputed)),
    "recomputed units, of a leaf": Case(lambda: Chain(recomputed), with_leaf),
    "recomputed in units": Case(lambda: Chain(part=Recomputing)),
    "recomputed in units, of a leaf": Case(lambda: Chain(part=Recomputing), with_leaf),
    "recomputed by a reentrant pass": Case(lambda: Chain(partial(recomputed, reentrant=True)), with_leaf),
    "skipped units": Case(
        lambda: Chain(count=4), skipping, steps=3, unused=("parts.3.linear.weight", "parts.3.linear.bias")
    ),
    "frozen parameters": Case(partly_frozen, unused=FROZEN),
    "frozen and unfrozen between steps": Case(Chain, freezing),
    "tied parameters of a unit": Case(Tied),
    "two backward passes of one forward pass": Case(Chain, twice_backward),
    "evaluation between steps": Case(Chain, evaluating),
    "inputs changed in place": Case(
        lambda: nn.Sequential(nn.Linear(6, 6), Bending(), Bending(), nn.Tanh()), kinds=Bending
    ),
    "a dict": nested(lambda y: {"y": y, "z": None}, lambda found: found["y"]),
    "a dataclass": nested(lambda y: Packed(y, ({"z": y * 2},)), lambda found: found.x),
    "an object": nested(Secret, lambda found: found.y),
    "frozen dataclasses as inputs": Case(lambda: Chain(packing, part=Taking)),
    "attention": Case(Attending, kinds=nn.TransformerEncoderLayer),
    "convolution and recurrence": Case(Convolving, kinds=(nn.Conv1d, nn.GRU)),
}


@each_strategy
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, name: str) -> None:
    check_gradients(CASES[case], name)


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
def test_tied_parameters_load_into_another_model(name: str) -> None:
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


def test_backward_is_weighted_by_the_samples_of_its_own_forward_pass() -> None:
    """Not those of a later evaluation."""

    def rank(group: Group) -> Any:
        model = FSDP(made(lambda: Chain().double()), group)
        rows = X[: 1 + 2 * group.rank]
        y = model(rows)
        model(X[:2])
        (y**2).mean().backward()
        return model.sharded.padded_gradients()

    reference = made(lambda: Chain().double())
    rows = torch.cat([X[:1], X[:3]])
    (reference(rows) ** 2).mean().backward()
    assert_same_gradients(run_ranks(2, rank, config=HASTY), "full", reference)


def test_input_gradients_are_not_scaled() -> None:
    """They are this rank's own, and scaled by nothing."""

    def rank(group: Group) -> Any:
        model = FSDP(made(lambda: Chain().double()), group, auto_wrap=Part)
        x = X.clone().requires_grad_()
        (model(x) ** 2).mean().backward()
        (other,) = torch.autograd.grad((model(x) ** 2).mean(), x)
        torch.testing.assert_close(other, x.grad)
        return x.grad, sum(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad.numel())

    reference, x = made(lambda: Chain().double()), X.clone().requires_grad_()
    (reference(x) ** 2).mean().backward()
    for gradient, trained in run_ranks(2, rank, config=HASTY):
        torch.testing.assert_close(gradient, x.grad)
        assert trained


@each_strategy
def test_an_optimizer_made_before_wrapping_raises_step_order_error(name: str) -> None:
    """One that was made before the module was wrapped; torch's would pass over parameters without gradients."""

    def rank(group: Group) -> None:
        net = made(lambda: Chain().double())
        early, stranger = torch.optim.SGD(net.parameters(), lr=0.1), nn.Linear(2, 2)
        model = FSDP(net, group, auto_wrap=Part, **chosen(name))
        for _ in range(2):
            (model(X) ** 2).mean().backward()
            with pytest.raises(StepOrderError, match=r"this SGD has: wrap the module first, then .*model.parameters"):
                early.step()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            torch.optim.SGD(stranger.parameters(), lr=0.1).step()

    run_ranks(2, rank, config=HASTY)
