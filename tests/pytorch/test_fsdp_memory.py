"""Units are whole while they run, and at no other time: what autograd keeps of them holds no memory."""

from __future__ import annotations

import gc
from typing import Any
from weakref import finalize

import pytest
import torch
from pytorch.torch_models import assert_same_gradients, data, loss_of, made, net, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint
from unit.parallel.sharding.models import HASTY, chosen

from paceline._group import Group
from paceline.errors import StepOrderError
from paceline.testing import run_ranks
from paceline.torch import FSDP

pytestmark = pytest.mark.needs(what="torch")

WIDTH, LAYERS = 64, 6


class Watched(nn.Linear):
    """Tells of each pass through it."""

    def __init__(self, width: int, look: Any) -> None:
        super().__init__(width, width)
        self.look = look

    def forward(self, x: Any) -> Any:
        self.look()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self.look())
        return y


class Recomputed(nn.Module):
    """A module that is run again in the backward pass."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("recompute", ["no", "inside", "around"])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("name", "precision"), [("full", None), ("full", "bf16"), ("hybrid2", None), ("grad", None)])
def test_units_are_freed_after_each_pass(name: str, precision: str | None, ahead: int, recompute: str) -> None:
    """In elements: of layers that are whole at one time, seen from inside all of them in both passes."""

    def rank(group: Group) -> Any:
        seen: list[int] = []
        layers: list[Any] = []

        def look() -> None:
            seen.append(sum(not torch.isnan(layer.weight).all() for layer in layers))

        model: Any = nn.Sequential()
        for _ in range(LAYERS):
            layer = made(lambda: Watched(WIDTH, look))
            layers.append(layer)
            inner = Recomputed(layer) if recompute == "inside" else layer
            unit = FSDP(inner, group, mixed_precision=precision, ahead=ahead, **chosen(name))
            model.append(Recomputed(unit) if recompute == "around" else unit)
        fsdp = FSDP(model, group, mixed_precision=precision, ahead=ahead, **chosen(name))
        x = torch.ones(2, WIDTH, requires_grad=True)
        for _ in range(2):
            fsdp(x).sum().backward()
        return max(seen), seen, sum(not torch.isnan(layer.weight).all() for layer in layers)

    for most, seen, after in run_ranks(2, rank):
        assert len(seen) == 2 * LAYERS * (2 if recompute == "no" else 3)
        if name == "grad":  # kept whole
            assert (most, after) == (LAYERS, LAYERS)
        else:
            assert most <= 1  # what is fetched ahead is not shown before it is needed
            assert after == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_peak_memory_is_bounded_and_all_of_it_is_freed(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most bytes of the group's memory that are referred to at one time, by whomever."""
    peak: dict[int, int] = {0: 0, 1: 0}
    live: dict[int, int] = {0: 0, 1: 0}
    empty = Group.empty

    def counted(group: Group, *args: Any, **kwargs: Any) -> Any:
        array = empty(group, *args, **kwargs)
        rank, size = group.rank, array.nbytes
        live[rank] += size
        peak[rank] = max(peak[rank], live[rank])

        def gone() -> None:
            live[rank] -= size

        finalize(array, gone)
        return array

    def rank(group: Group) -> None:
        model = nn.Sequential(*(made(lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)))
        kinds: Any = nn.Linear
        if recompute:
            model, kinds = nn.Sequential(*(Recomputed(layer) for layer in model)), Recomputed
        fsdp = FSDP(model, group, auto_wrap=kinds)
        fsdp.prepare()
        gc.collect()
        peak[group.rank] = live[group.rank]
        assert live[group.rank] == 0
        for _ in range(2):
            fsdp(torch.ones(2, WIDTH)).sum().backward()
        fsdp.zero_grad()

    monkeypatch.setattr(Group, "empty", counted)
    run_ranks(2, rank)
    gc.collect()
    layer = 4 * WIDTH * (WIDTH + 1)
    assert max(peak.values()) <= 5 * layer  # values of this one and the next, gradients of this and two on their way
    assert live == {0: 0, 1: 0}


def test_parameters_read_as_nan_outside_unshard() -> None:
    def rank(group: Group) -> None:
        model = wrap(net(), group, "full")
        x, t = data(4)
        loss_of(model(x), t).backward()
        weight = model.module.blocks[0].module.linear.weight
        assert weight.shape == (7, 7)
        assert torch.isnan(weight).all()
        with model.unshard():
            assert not torch.isnan(weight).any()
        assert torch.isnan(weight).all()
        assert sum(p.numel() for p in model.parameters()) <= 0.51 * sum(p.numel() for p in model.module.parameters())

    run_ranks(2, rank)


def test_in_place_changes_of_saved_tensors_raise() -> None:
    class Spoiling(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = torch.exp(super().forward(x))
            z = y * y
            y.add_(1)
            return z

    def rank(group: Group) -> Any:
        model = FSDP(made(lambda: Spoiling(3, 3)), group)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.ones(2, 3)).sum().backward()

    run_ranks(2, rank)


def test_training_recovers_after_a_backward_pass_raises() -> None:
    """All ranks raise alike; the next step is as if it had not been."""
    x, t = data(6)

    def rank(group: Group) -> Any:
        model = wrap(net(), group, "full")
        raising = [True]

        def fail(gradient: Any) -> None:
            if raising:
                raise ZeroDivisionError

        def attach(module: Any, args: Any, out: Any) -> None:
            out.register_hook(fail)

        handle = model.module.blocks[1].module.register_forward_hook(attach)
        with pytest.raises(ZeroDivisionError):
            loss_of(model(x), t).backward()
        raising.clear()
        assert all(p.grad is None for p in model.parameters())
        handle.remove()
        loss_of(model(x), t).backward()
        return model.sharded.padded_gradients()

    reference = net()
    loss_of(reference(x), t).backward()
    assert_same_gradients(run_ranks(2, rank, config=HASTY), "full", reference)


def test_backward_inside_unshard_raises_step_order_error() -> None:
    def rank(group: Group) -> None:
        model = wrap(net(), group, "full")
        x, t = data(4)
        with model.unshard(), pytest.raises(StepOrderError, match="unshard"):
            loss_of(model(x), t).backward()
        loss_of(model(x), t).backward()

    run_ranks(2, rank, config=HASTY)
