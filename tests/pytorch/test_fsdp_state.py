"""The state of a torch model that is spread goes on in any other world, strategy or process as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.torch_models import assert_close, data, loss_of, net, rows_of, wrap
from unit.parallel.sharding.models import each_strategy, strategies

import paceline
from paceline import checkpoint
from paceline._group import Group
from paceline._parallel._optimizer_state import standing_for
from paceline.errors import InvalidRank, SizeMismatch, StepOrderError, UnsupportedOp
from paceline.testing import run_ranks

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.usefixtures("place")]

X, T = data(12)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9), amsgrad=True)


def momentum(model: Any) -> Any:
    return torch.optim.SGD([{"params": list(model.parameters()), "lr": 0.1}], momentum=0.9)


def go(model: Any, optimizer: Any, rank: int, world: int, steps: int) -> None:
    rows = rows_of(rank, world, len(X))
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model(X[rows]), T[rows]).backward()
        optimizer.step()


def uninterrupted(make: Any, steps: int) -> dict[str, Any]:
    model = net()
    go(model, make(model), 0, 1, steps)
    return dict(model.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_full_state_dicts_load_in_every_strategy_bit_for_bit(world: int, precision: str | None) -> None:
    """From each strategy to each other one, and to and from the bare module, bit for bit."""

    def rank(group: Group) -> Any:
        states = []
        for name in strategies(world):
            model = wrap(net(1, torch.float32), group, name, mixed_precision=precision)
            model.load_state_dict(net(0, torch.float32).state_dict() if not states else states[-1])
            states.append(model.state_dict())
            model(X.float()[:1])
            states.append(model.state_dict())
        assert "scratch" not in states[0]
        return states

    expected = net(0, torch.float32).state_dict()
    for states in run_ranks(world, rank):
        for number, state in enumerate(states):
            assert int(state.pop("calls")) == (number + 1) // 2  # one call between two states of a strategy
            assert state.keys() | {"calls"} == expected.keys()
            assert all(torch.equal(values, expected[path]) for path, values in state.items())


def test_state_dict_with_root_is_returned_on_that_rank_only() -> None:
    def rank(group: Group) -> Any:
        model = wrap(net(), group, "full")
        with pytest.raises(InvalidRank):
            model.state_dict(root=2)
        return model.state_dict(root=1)

    first, second = run_ranks(2, rank)
    assert first == {}
    assert_close(second, net().state_dict())


def test_states_of_another_model_are_refused() -> None:
    def rank(group: Group) -> None:
        model = wrap(net(), group, "full")
        before = model.state_dict()
        state = dict(before)
        state["enter.weight"] = torch.zeros(7, 6)
        with pytest.raises(SizeMismatch, match=r"enter.weight"):
            model.load_state_dict(state)
        with pytest.raises(SizeMismatch, match="unexpected"):
            model.load_state_dict({**before, "more": torch.zeros(1)})
        with pytest.raises(UnsupportedOp, match="whole state"):
            model.load_state_dict(before, strict=False)
        assert_close(model.state_dict(), before)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("before", "after", "make"),
    [
        ((1, "full"), (3, "full"), adamw),
        ((2, "full"), (4, "hybrid2"), momentum),
        ((4, "hybrid2"), (3, "grad"), adamw),
        ((3, "none"), (2, "full"), momentum),
        ((2, "grad"), (1, "none"), adamw),
    ],
)
def test_sharded_checkpoints_load_in_another_world_and_strategy(
    before: tuple[int, str], after: tuple[int, str], make: Any, tmp_path: Path
) -> None:
    """Saved in one world and strategy, loaded in another: trained on, it is what one process gets in one go."""

    def first(group: Group) -> None:
        model = wrap(net(), group, before[1], "nested")
        optimizer = make(model)
        go(model, optimizer, group.rank, before[0], 3)
        checkpoint.save_sharded(tmp_path, paceline.sharded_state(model, optimizer), (1, 3), group)

    def second(group: Group) -> Any:
        model = wrap(net(1), group, after[1])
        optimizer = make(model)
        optimizer.param_groups[0]["lr"] = 5.0  # comes with the state
        found = checkpoint.load_sharded(tmp_path, paceline.sharded_state(model, optimizer), group)
        assert found is not None
        paceline.load_sharded_state(found.state, model, optimizer)
        go(model, optimizer, group.rank, after[0], 2)
        return model.state_dict()

    run_ranks(before[0], first)
    expected = uninterrupted(make, 5)
    for state in run_ranks(after[0], second):
        assert_close(state, expected)


def test_optimizer_state_is_sharded() -> None:
    def rank(group: Group) -> Any:
        model = wrap(net(), group, "full")
        optimizer = adamw(model)
        go(model, optimizer, group.rank, 2, 1)
        return sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.ndim)

    total = sum(p.numel() for p in net().parameters())
    kept = run_ranks(2, rank)
    assert sum(kept) == 3 * total  # two moments, and the largest of one
    assert max(kept) < 0.55 * 3 * total


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
        lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RAdam,
    ],
)
def test_optimizer_state_made_before_the_first_step_changes_no_bit(make: Any) -> None:
    def rank(group: Group) -> Any:
        states = []
        for known in (False, True):
            model = wrap(net(), group, "full")
            optimizer = make(model.parameters())
            if known:
                assert standing_for(optimizer) is standing_for(optimizer)
                assert standing_for(optimizer).is_new
            go(model, optimizer, group.rank, 2, 3)
            states.append(model.state_dict())
        assert not standing_for(optimizer).is_blank or not optimizer.state[next(iter(model.parameters()))]
        return states

    for plain, known in run_ranks(2, rank):
        assert all(torch.equal(plain[path], known[path]) for path in plain)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.NAdam, "does not begin with zeros"),
        (torch.optim.Adamax, "does not begin with zeros"),
        (torch.optim.LBFGS, "does not step by itself"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda p: torch.optim.SGD([*p, torch.nn.Parameter(torch.zeros(1))], lr=0.1), "and other parameters"),
    ],
)
def test_optimizers_whose_state_cannot_be_sharded_are_refused(make: Any, text: str) -> None:
    def rank(group: Group) -> None:
        model = wrap(net(), group, "full")
        with pytest.raises(UnsupportedOp, match=text):
            paceline.sharded_state(model, make(model.parameters()))

    run_ranks(1, rank)


@each_strategy
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_changes_inside_unshard_are_kept(name: str, precision: str | None) -> None:
    def rank(group: Group) -> Any:
        model = wrap(net(0, torch.float32), group, name, mixed_precision=precision)
        model(X.float()[:1])
        with torch.no_grad(), model.unshard() as whole:
            assert whole.keys() == dict(net().named_parameters()).keys()
            whole["blocks.1.linear.weight"] += 0.123456789
            inside = {path: p.clone() for path, p in whole.items()}
        after = model.state_dict()
        assert all(torch.equal(after[path], p) for path, p in inside.items())
        return after, dict(net(0, torch.float32).named_parameters())

    for after, before in run_ranks(2, rank):
        before["blocks.1.linear.weight"] = before["blocks.1.linear.weight"] + 0.123456789
        assert all(torch.equal(after[path], p) for path, p in before.items())


def test_an_optimizer_made_before_wrapping_is_refused() -> None:
    def rank(group: Group) -> None:
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = wrap(module, group, "full")
        with pytest.raises(StepOrderError, match="wrap the module first"):
            paceline.sharded_state(model, optimizer)

    run_ranks(1, rank)


def test_an_optimizer_of_another_model_is_refused() -> None:
    def rank(group: Group) -> None:
        model, bare = wrap(net(), group, "full"), torch.nn.Linear(2, 2)
        with pytest.raises(UnsupportedOp, match="cannot train the shards"):
            paceline.sharded_state(model, torch.optim.SGD(bare.parameters(), lr=0.1))

    run_ranks(1, rank)


def test_sharded_state_triggers_no_step_hook_or_scheduler_warning() -> None:
    def rank(group: Group) -> Any:
        model = wrap(net(), group, "full")
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        heard: list[str] = []
        optimizer.register_step_post_hook(lambda *args: heard.append("step"))
        paceline.sharded_state(model, optimizer)
        assert heard == []
        go(model, optimizer, group.rank, 2, 1)
        scheduler.step()
        assert heard == ["step"]
        return np.array(optimizer.param_groups[0]["lr"])

    assert [float(lr) for lr in run_ranks(2, rank)] == [0.005, 0.005]
