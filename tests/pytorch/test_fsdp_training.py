"""Training a torch model that is spread is training it in one process, whatever the world, strategy and units."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.torch_models import assert_close, assert_same_gradients, data, loss_of, made, net, rows_of, train, wrap
from torch import nn
from unit.parallel.sharding.models import cases, chosen, each_strategy, strategies

from paceline._group import Group
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.testing import run_ranks
from paceline.torch import FSDP
from support.turns import by_turns

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.parametrize("place", ["cpu", "device", "engine"], indirect=True),
    pytest.mark.usefixtures("place"),
]

CASES = cases(1, 2, 3, 4)


def alone(kind: str = "adamw", dtype: Any = torch.float64) -> dict[str, Any]:
    model = net(0, dtype)
    train(model, np.arange(22), kind=kind)
    return dict(model.state_dict())


def backpropagated(x: Any, t: Any) -> Any:
    """One process's model, with gradients."""
    model = net()
    loss_of(model(x), t).backward()
    return model


@pytest.mark.parametrize(
    ("world", "name", "units", "kind"),
    by_turns(CASES, [("one", "adamw"), ("blocks", "sgd"), ("nested", "adamw"), ("one", "sgd"), ("nested", "sgd")]),
)
def test_any_world_and_strategy_trains_as_one_process(world: int, name: str, units: str, kind: str) -> None:
    """Each rank starts from weights of its own, and has a share of its own size; rank 0's weights must prevail."""

    def rank(group: Group) -> Any:
        model = wrap(net(group.rank), group, name, units)
        train(model, rows_of(group.rank, world, 22), kind=kind)
        return model.state_dict()

    expected = alone(kind)
    states = run_ranks(world, rank)
    for state in states:
        assert_close(state, expected)
        assert all(torch.equal(state[path], states[0][path]) for path in state)


@pytest.mark.parametrize("name", strategies(1))
def test_a_world_of_one_trains_the_bits_of_the_bare_module(name: str) -> None:
    def rank(group: Group) -> Any:
        model = wrap(net(0, torch.float32), group, name)
        train(model, np.arange(22))
        return model.state_dict()

    expected = alone(dtype=torch.float32)
    assert all(torch.equal(value, expected[path]) for path, value in run_ranks(1, rank)[0].items())


@pytest.mark.parametrize("ahead", [0, 1, 3])
@each_strategy
def test_fetching_ahead_changes_no_bit(name: str, ahead: int) -> None:
    def rank(group: Group, ahead: int) -> Any:
        model = wrap(net(), group, name, "nested", ahead=ahead)
        train(model, rows_of(group.rank, 2, 22))
        return model.state_dict()

    plain = run_ranks(2, lambda group: rank(group, 0))[0]
    for state in run_ranks(2, lambda group: rank(group, ahead)):
        assert all(torch.equal(state[path], plain[path]) for path in plain)


def micro_batches(model: Any, x: Any, t: Any, rank: int) -> None:
    """Nothing is pending after the last."""
    for number, rows in enumerate(np.array_split(np.arange(len(x)), 2)):
        with model.no_sync() if number == 0 else nullcontext():
            (loss_of(model(x[rows]), t[rows]) / 2).backward()
    model.sync_gradients()


def dropped_then_by_hand(model: Any, x: Any, t: Any, rank: int) -> None:
    with model.no_sync():
        loss_of(model(x), t).backward()
        model.zero_grad()
        loss_of(model(x), t).backward()
    model.sync_gradients()


def one_rank_that_counts_nothing(model: Any, x: Any, t: Any, rank: int) -> None:
    """It may have anything, NaN too; it takes part in all that is sent."""
    x, t = data(24)
    model.backward(loss_of(model(x * float("nan") if rank else x), t), weight=1.0 - rank)


@pytest.mark.parametrize(
    ("passes", "world", "name"),
    [
        *((micro_batches, *case) for case in CASES),
        *((dropped_then_by_hand, *case) for case in cases(2)),
        *((one_rank_that_counts_nothing, *case) for case in cases(2)),
    ],
)
def test_gradients_match_one_process(passes: Any, world: int, name: str) -> None:
    x, t = data(24)

    def rank(group: Group) -> Any:
        model = wrap(net(), group, name)
        rows = rows_of(group.rank, world, 24)
        passes(model, x[rows], t[rows], group.rank)
        return model.sharded.padded_gradients()

    assert_same_gradients(run_ranks(world, rank), name, backpropagated(x, t))


def test_weights_that_sum_to_zero_raise_step_order_error() -> None:
    x, t = data(6)

    def rank(group: Group) -> Any:
        model = wrap(net(), group, "full")
        with pytest.raises(StepOrderError, match="add up to 0"):
            model.backward(loss_of(model(x), t), weight=0.0)
        loss_of(model(x), t).backward()
        return model.sharded.padded_gradients()

    assert_same_gradients(run_ranks(2, rank), "full", backpropagated(x, t))


@pytest.mark.parametrize(("world", "name", "p"), by_turns(CASES, [(2.0,), (float("inf"),), (1.5,)]))
def test_clip_grad_norm_matches_torch(world: int, name: str, p: float) -> None:
    x, t = data(8)
    reference = backpropagated(x, t)
    filled = [q for q in reference.parameters() if q.numel()]  # torch knows no largest of nothing
    expected = float(torch.nn.utils.clip_grad_norm_(filled, 0.1, p))

    def rank(group: Group) -> Any:
        model = wrap(net(), group, name)
        rows = rows_of(group.rank, world, 8)
        loss_of(model(x[rows]), t[rows]).backward()
        return model.clip_grad_norm(0.1, p), model.sharded.padded_gradients()

    norms, found = zip(*run_ranks(world, rank), strict=True)
    assert norms == pytest.approx([expected] * world, rel=1e-12)
    assert_same_gradients(found, name, reference, 1e-6)


@pytest.mark.parametrize("name", ["full", "grad"])
def test_torch_clip_grad_norm_is_refused_and_the_method_clips(name: str) -> None:
    """The weights are those of one process that clips with torch's function, which is refused where it would be wrong.

    In a world of one too: whoever tries a script on one machine finds out there.
    """
    x, t = data(8)
    reference = net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(reference(x), t).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        optimizer.step()

    def rank(group: Group) -> Any:
        model = wrap(net(), group, name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows, found = rows_of(group.rank, group.size, 8), []
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model(x[rows]), t[rows]).backward()
            before = [p.grad.clone() for p in model.parameters()]
            for foreach in (None, False, True):
                with pytest.raises(UnsupportedOp, match=r"call model\.clip_grad_norm_\(max_norm\)"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)
            assert all(torch.equal(p.grad, values) for p, values in zip(model.parameters(), before, strict=True))
            found.append(model.clip_grad_norm_(0.05))
            optimizer.step()
        return found, model.state_dict()

    for world in (1, 2):
        for found, state in run_ranks(world, rank):
            torch.testing.assert_close(found, norms)
            assert_close(state, dict(reference.state_dict()) | {"calls": state["calls"]}, 1e-6)


def test_torch_clip_grad_norm_works_without_sharding() -> None:
    x, t = data(8)
    reference = backpropagated(x, t)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)

    def rank(group: Group) -> Any:
        model = wrap(net(), group, "none")
        rows = rows_of(group.rank, group.size, 8)
        loss_of(model(x[rows]), t[rows]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return model.sharded.padded_gradients()

    assert_same_gradients(run_ranks(2, rank), "none", reference, 1e-6)


def test_norms_of_a_gradient_shard_are_refused() -> None:
    def rank(group: Group) -> None:
        model = wrap(net(), group, "full")
        x, t = data(4)
        loss_of(model(x), t).backward()
        for p in model.parameters():
            for norm in (torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm):
                with pytest.raises(UnsupportedOp, match="is not that of the whole"):
                    norm(p.grad)
            assert type(p.grad * 2) is type(p.grad.detach()) is type(p.grad.clone()) is torch.Tensor
            assert p.grad.detach().norm() >= 0
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)

    run_ranks(2, rank)


@pytest.mark.parametrize(("world", "name", "units"), by_turns(cases(1, 2, 4), [("one",), ("nested",)]))
def test_mixed_precision_trains_close_to_full_precision(world: int, name: str, units: str) -> None:
    """Close to all bits; the pieces, their gradients and the optimizer keep theirs; nothing of the masters is lost."""

    def rank(group: Group) -> Any:
        model = wrap(net(0, torch.float32), group, name, units, mixed_precision="bf16")
        seen: list[Any] = []
        model.module.norm.register_forward_hook(
            lambda module, args, out: seen.append((module.weight.dtype, args[0].dtype, out.dtype))
        )
        losses = train(model, rows_of(group.rank, world, 22), steps=8)
        assert set(seen) == {(torch.bfloat16,) * 3}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        before = model.state_dict()
        with model.unshard() as whole:
            assert all(torch.equal(p, before[path]) for path, p in whole.items())
        model(data(4, torch.float32)[0])
        return losses, before, model.state_dict()

    reference = net(0, torch.float32)
    expected = train(reference, np.arange(22), steps=8)
    states = run_ranks(world, rank)
    for losses, before, after in states:
        assert losses[-1] < 0.8 * losses[0]
        for path, values in reference.named_parameters():
            torch.testing.assert_close(before[path], values, rtol=0.05, atol=0.05)
            assert torch.equal(before[path], after[path])
            assert torch.equal(before[path], states[0][1][path])
    mean = np.average([losses for losses, _, _ in states], axis=0, weights=[len(a) for a in shares(world)])
    np.testing.assert_allclose(mean, expected, rtol=0.05)


def shares(world: int) -> list[Any]:
    return [rows_of(rank, world, 22) for rank in range(world)]


@each_strategy
def test_a_full_precision_unit_inside_a_bf16_model(name: str) -> None:
    """Statistics of a batch are buffers, which are not narrowed."""

    def rank(group: Group) -> Any:
        model = made(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)))
        model[1] = FSDP(model[1], group, **chosen(name))
        model = FSDP(model, group, auto_wrap=nn.Linear, mixed_precision="bf16", **chosen(name))
        seen: list[Any] = []
        model.module[1].module.register_forward_hook(lambda module, args, out: seen.append(module.weight.dtype))
        losses = train(model, rows_of(group.rank, 2, 22), steps=8)
        assert set(seen) == {torch.float32}
        assert losses[-1] < losses[0]
        return model.state_dict()

    first, second = run_ranks(2, rank)
    assert first["1.running_mean"].dtype == torch.float32
    assert all(torch.equal(first[path], second[path]) for path in first)


def test_mixed_precision_other_than_bf16_is_refused() -> None:
    def rank(group: Group) -> None:
        with pytest.raises(UnsupportedOp, match="mixed_precision"):
            wrap(net(), group, "full", mixed_precision="fp16")

    run_ranks(1, rank)
