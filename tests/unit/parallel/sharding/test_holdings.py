"""Another share of a model and its optimizer: room for it, the change, and the way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paceline
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline._parallel.sharding._holdings import ShardMove, holding, places_of
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.testing import run_ranks
from support.parts import SOON


def make(group: Any, strategy: str = "full_shard") -> tuple[Any, Any]:
    model = paceline.FSDP(
        paceline.nn.Linear(3, 4, rng=np.random.default_rng(0), dtype=np.float64),
        group,
        paceline.ShardingStrategy(strategy),
    )
    return model, paceline.optim.Adam(model)


@pytest.fixture
def alone() -> Any:
    group = Group(local_meshes(1)[0], SOON)
    yield group
    group.close(0.2)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_shard_move_switches_one_rank_to_another_share(alone: Any, strategy: str) -> None:
    model, optimizer = make(alone, strategy)
    whole = np.concatenate([p.data.reshape(-1) for _, p in model.named_parameters()])
    move = ShardMove([model._sharded], [optimizer], (2, 3))  # elements 12 to 15 of 16, and padding
    held = holding([model._sharded], [optimizer])
    assert held.share == (0, 1)
    for (_, p), (place, size) in zip(model.named_parameters(), places_of([model._sharded], 3).values(), strict=True):
        target = move.target.values[id(p)]
        start, stop = (min(max(part * size - place, 0), held.values[id(p)].values.size) for part in (2, 3))
        assert (target.start, target.values.size) == (start if start < stop else 0, stop - start)
        target.values[...] = held.values[id(p)].values.reshape(-1)[start:stop]
    for state in move.target.states[id(optimizer)].values():
        state.values[...] = 5
    model.module.bias.grad = np.ones(4)
    move.switch()
    assert model.module.bias.grad is None, "it has no place in the gradients of another share"
    assert holding([model._sharded], [optimizer]).share == (2, 3)
    assert [p.shape for _, p in model.named_parameters()] == [(0,), (4,)]
    np.testing.assert_array_equal(dict(model.named_parameters())["bias"].data, whole[12:])
    assert optimizer.live_arrays()["bias/mean"].tolist() == [5] * 4
    assert optimizer.live_arrays()["weight/mean"].shape == (0,)
    for _, p in model.named_parameters():
        p.grad = np.ones(p.shape)
    optimizer.step()  # its scratch fits too


def test_shard_move_inside_unshard_is_refused() -> None:
    def rank(group: Any) -> None:
        model, optimizer = make(group)
        with model.unshard(), pytest.raises(StepOrderError, match=r"inside unshard\(\)"):
            ShardMove([model._sharded], [optimizer], (0, 1))

    run_ranks(2, rank)


def test_optimizer_state_of_another_shape_is_refused(alone: Any) -> None:
    class Odd(paceline.optim.SGD):
        def _fresh(self, parameter: Any) -> dict[str, Any]:
            return {"momentum": np.zeros(5)}

    model, _ = make(alone)
    with pytest.raises(UnsupportedOp, match="'weight/momentum' of this Odd does not have its parameter's shape"):
        holding([model._sharded], [Odd(model, lr=1.0, momentum=0.5)])


def test_units_that_are_sharded_differently_are_refused() -> None:
    def rank(group: Any) -> None:
        linear = paceline.nn.Linear(3, 4, rng=np.random.default_rng(0), dtype=np.float64)
        pairs = paceline.FSDP(linear, group, paceline.ShardingStrategy.HYBRID_SHARD, 2)
        with pytest.raises(UnsupportedOp, match="sharded in different ways"):
            holding([make(group)[0]._sharded, pairs._sharded], [])

    run_ranks(4, rank)
