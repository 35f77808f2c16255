"""What goes into a unit and comes out of it, how often it is called, and for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pytorch.torch_models import Chain, Part, X, check_gradients, made
from torch import nn
from torch.nn import functional as F
from unit.parallel.sharding.models import strategies

from paceline import ShardingStrategy
from paceline._group import Group
from paceline.config import Config
from paceline.errors import StepOrderError
from paceline.testing import run_ranks
from paceline.torch import FSDP

pytestmark = pytest.mark.needs(what="torch")

HASTY = Config(step_timeout=5.0)
each_strategy = pytest.mark.parametrize("name", strategies(2))


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
def test_units_take_and_return_nested_values(name: str, form: str) -> None:
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

    check_gradients(lambda: nn.Sequential(Part(), Nested(), Part()), name)


@each_strategy
def test_units_may_change_inputs_in_place(name: str) -> None:
    class Bending(Part):
        def forward(self, x: Any) -> Any:
            return self.linear(F.relu_(x.mul_(2)))

    check_gradients(lambda: nn.Sequential(nn.Linear(6, 6), Bending(), Bending(), nn.Tanh()), name, kinds=Bending)


@each_strategy
def test_two_backward_passes_of_one_forward_pass(name: str) -> None:
    def call(model: Any, x: Any, number: int) -> Any:
        loss = (model(x) ** 2).mean()
        loss.backward(retain_graph=True)
        return loss

    check_gradients(Chain, name, call=call)


@dataclass(frozen=True)
class Given:
    x: Any
    more: tuple[Any, ...] = ()


def test_units_take_frozen_dataclasses() -> None:
    class Taking(Part):
        def forward(self, given: Given) -> Any:  # type: ignore[override]
            return super().forward(given.x) * given.more[0]

    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Part(), Taking()

        def forward(self, x: Any) -> Any:
            return self.second(Given(self.first(x), (x, "text")))

    check_gradients(Giving, "full")


@each_strategy
def test_evaluation_between_steps_changes_no_gradient(name: str) -> None:
    def call(model: Any, x: Any, number: int) -> Any:
        model.eval()
        with torch.no_grad():
            before = model(x)
        model.train()
        y = model(x)
        torch.testing.assert_close(y.detach(), before)
        return (y**2).mean()

    check_gradients(Chain, name, call=call)


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
    first, second = run_ranks(2, rank, config=HASTY)
    for path, parameter in reference.named_parameters():
        torch.testing.assert_close(torch.from_numpy(first[path] + second[path]), parameter.grad)


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


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_an_optimizer_made_before_wrapping_raises_step_order_error(strategy: ShardingStrategy) -> None:
    """One that was made before the module was wrapped; torch's would pass over parameters without gradients."""

    def rank(group: Group) -> None:
        net = made(lambda: Chain().double())
        early, stranger = torch.optim.SGD(net.parameters(), lr=0.1), nn.Linear(2, 2)
        size = 1 if strategy is ShardingStrategy.HYBRID_SHARD else None
        model = FSDP(net, group, strategy, size, auto_wrap=Part)
        for _ in range(2):
            (model(X) ** 2).mean().backward()
            with pytest.raises(StepOrderError, match=r"this SGD has: wrap the module first, then .*model.parameters"):
                early.step()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            torch.optim.SGD(stranger.parameters(), lr=0.1).step()

    run_ranks(2, rank, config=HASTY)
