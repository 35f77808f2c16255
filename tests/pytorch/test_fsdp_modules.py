"""What torch modules do: share, freeze and skip parameters, run twice, recompute, and return whatever they like."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from unit.parallel.sharding.models import chosen, strategies

from paceline.config import Config
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline.group import Group
from paceline.testing import run_ranks
from paceline.torch import FSDP
from support.torch_models import assert_close, data, loss_of, made, net, wrap

pytestmark = pytest.mark.torch

HASTY = Config(step_timeout=5.0)
each_strategy = pytest.mark.parametrize("name", strategies(2))
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


class Part(nn.Module):
    """Rotates and bends; what every test wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.linear(x))


def check(make: Any, name: str, *, steps: int = 2, kinds: Any = Part, call: Any = None, unused: Any = ()) -> None:
    """Gradients of two ranks with two rows each are those of one process with all four.

    Args:
        make: makes a module.
        name: the strategy.
        steps: forward and backward passes; gradients add up.
        kinds: what is a unit.
        call: of (model, x, number of the step) to the loss; by default the sum of squares.
        unused: paths that get no gradient.
    """
    call = (lambda model, x, number: (model(x) ** 2).mean()) if call is None else call
    reference = made(make).double()
    for number in range(steps):
        call(reference, X, number).backward()

    def rank(group: Group) -> Any:
        model = FSDP(made(make).double(), group, auto_wrap=kinds, **chosen(name))
        for number in range(steps):
            call(model, X[2 * group.rank : 2 * group.rank + 2], number).backward()
        return model.engine.padded_gradients(), len(model.engine._unit.placement.replicas)

    ranks = run_ranks(2, rank, config=HASTY)
    expected = {path: p.grad for path, p in reference.named_parameters()}
    found: dict[str, Any] = {}
    for path in expected:
        parts = [padded[path] for padded, _ in ranks]
        found[path] = None if parts[0] is None else torch.from_numpy(parts[0] + parts[1]) / ranks[0][1]
    assert {path for path, gradient in found.items() if gradient is None} == set(unused)
    assert_close(found, expected)


class Chain(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(count))

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


@each_strategy
def test_units_run_twice(name: str) -> None:
    class Twice(Chain):
        def forward(self, x: Any) -> Any:
            return super().forward(super().forward(x)) + x

    check(Twice, name)


@each_strategy
def test_units_side_by_side(name: str) -> None:
    """One input, several units of it; and a unit whose output is used by several."""

    class Branches(Chain):
        def forward(self, x: Any) -> Any:
            x = self.parts[0](x)
            return self.parts[1](x) * self.parts[2](x) + x

    check(Branches, name)


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

    check(make, name, call=call, kinds=(Part, Inner))


@each_strategy
def test_units_that_are_not_used_in_a_pass(name: str) -> None:
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

    check(lambda: Skipping(4), name, call=call, steps=3, unused=("parts.3.linear.weight", "parts.3.linear.bias"))


@each_strategy
def test_parameters_that_one_rank_does_not_use(name: str) -> None:
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
    check(make, name, unused=unused)


@each_strategy
def test_freezing_between_steps(name: str) -> None:
    def call(model: Any, x: Any, number: int) -> Any:
        parameters = dict(model.named_parameters())
        parameters["parts.0.linear.weight"].requires_grad_(number == 1)
        parameters["parts.2.linear.bias"].requires_grad_(number == 0)
        return (model(x) ** 2).mean()

    check(Chain, name, call=call)


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

    check(Tied, name)

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


def test_what_is_tied_across_units_is_refused() -> None:
    def rank(group: Group) -> None:
        first, second = Part(), Part()
        second.linear.weight = first.linear.weight
        with pytest.raises(UnsupportedOp, match="tied"):
            FSDP(nn.Sequential(first, second), group, auto_wrap=Part)

    run_ranks(1, rank)


@dataclass
class Outcome:
    y: Any
    extra: dict[str, Any]


class Secret:
    """Nobody looks into it."""

    def __init__(self, y: Any) -> None:
        self.y = y


@each_strategy
@pytest.mark.parametrize("form", ["dict", "dataclass", "object"])
def test_whatever_goes_in_and_comes_out(name: str, form: str) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Packing()

        def forward(self, x: Any) -> Any:
            found = self.part({"a": [x, None], "b": 2}, scale=(x * 2, "text"))
            return found["y"] if isinstance(found, dict) else found.y

    class Packing(Part):
        def forward(self, given: Any, *, scale: Any) -> Any:  # type: ignore[override]
            y = super().forward(given["a"][0] * given["b"]) * scale[0]
            return {"dict": lambda: {"y": y, "z": None}, "dataclass": lambda: Outcome(y, {"z": y * 2}),
                    "object": lambda: Secret(y)}[form]()  # fmt: skip

    check(lambda: nn.Sequential(Part(), Nested(), Part()), name)


@each_strategy
def test_changes_in_place(name: str) -> None:
    class Bending(Part):
        def forward(self, x: Any) -> Any:
            return self.linear(F.relu_(x.mul_(2)))

    check(lambda: nn.Sequential(nn.Linear(6, 6), Bending(), Bending(), nn.Tanh()), name, kinds=Bending)


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
def test_layers_of_other_kinds(make: Any, name: str) -> None:
    if make is Convolving:  # sparse gradients arrive dense, as FSDP cuts them
        check_dense = copy.deepcopy(made(make).double())
        check_dense.embed.sparse = False
        check(lambda: copy.deepcopy(check_dense).float(), name, kinds=(nn.Conv1d, nn.GRU))
        return
    check(make, name, kinds=(nn.TransformerEncoderLayer,))


def test_sparse_gradients() -> None:
    def rank(group: Group) -> Any:
        model = FSDP(made(lambda: nn.Embedding(4, 3, sparse=True)), group)
        model(torch.tensor([group.rank, 3])).sum().backward()
        return model.engine.padded_gradients()["weight"]

    first, second = run_ranks(2, rank)
    np.testing.assert_array_equal((first + second)[:, 0], [0.5, 0.5, 0, 1.0])


@each_strategy
def test_evaluation_between_steps(name: str) -> None:
    def call(model: Any, x: Any, number: int) -> Any:
        model.eval()
        with torch.no_grad():
            before = model(x)
        model.train()
        y = model(x)
        torch.testing.assert_close(y.detach(), before)
        return (y**2).mean()

    check(Chain, name, call=call)


def test_samples_of_the_pass_that_a_backward_pass_belongs_to() -> None:
    """Not those of a later evaluation."""

    def rank(group: Group) -> Any:
        model = FSDP(made(lambda: Chain().double()), group)
        rows = X[: 1 + 2 * group.rank]
        y = model(rows)
        model(X[:2])
        (y**2).mean().backward()
        return model.engine.padded_gradients()

    reference = made(lambda: Chain().double())
    rows = torch.cat([X[:1], X[:3]])
    (reference(rows) ** 2).mean().backward()
    first, second = run_ranks(2, rank, config=HASTY)
    for path, parameter in reference.named_parameters():
        torch.testing.assert_close(torch.from_numpy(first[path] + second[path]), parameter.grad)


def test_gradients_by_the_input() -> None:
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


def test_buffers_are_those_of_rank_0() -> None:
    def rank(group: Group) -> Any:
        model = made(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)).double())
        fsdp = FSDP(model, group)
        fsdp(X[2 * group.rank : 2 * group.rank + 2] + group.rank).sum().backward()
        return model[0].running_mean.clone(), fsdp.state_dict()

    (first, state), (second, _) = run_ranks(2, rank)
    assert torch.equal(first, second)
    assert torch.equal(state["0.running_mean"], first)
    assert int(state["0.num_batches_tracked"]) == 1


def test_misuse() -> None:
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


def test_a_difference_between_the_models_of_two_ranks() -> None:
    def rank(group: Group) -> None:
        model = FSDP(nn.Linear(3, 2 + group.rank), group)
        with pytest.raises(SizeMismatch, match=r"'weight' float32 \[3, 3\]"):
            model(torch.ones(1, 3))

    run_ranks(2, rank)


def test_loss_is_computed_with_the_module_alone() -> None:
    """What does not go through the wrapper finds no values, and says so by its result."""

    def rank(group: Group) -> None:
        model = FSDP(made(Chain), group)
        model.prepare()
        assert torch.isnan(model.module(X.float())).all()
        assert loss_of(model(X.float()), torch.zeros(4, 6)).isfinite()

    run_ranks(2, rank)
