"""What one rank alone knows must not decide what it sends: the others would take it for something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Branches, scale
from unit.parallel.sharding.models import HASTY, ONE, Ordered, chosen, each_strategy

from paceline import nn
from paceline._group import Group
from paceline._parallel import FSDP, ShardingStrategy
from paceline.errors import CollectiveMismatch, SizeMismatch
from paceline.optim import SGD
from paceline.testing import run_ranks

SIX = np.ones((1, 6))


def ordered(group: Group, *use: int, ahead: int = 1) -> tuple[FSDP, Ordered, list[Branches]]:
    """Three units of equal size with the values 1, 10 and 100."""
    blocks = [Branches("a", a=scale(*[10.0**n] * 6)) for n in range(3)]
    model = Ordered(*(FSDP(block, group) for block in blocks))
    model.use = use
    return FSDP(model, group, ahead=ahead), model, blocks


def test_an_error_after_the_last_unit_on_one_rank_keeps_the_unit_order() -> None:
    def rank(g: Group) -> Any:
        fsdp, model, blocks = ordered(g, 0, 2, 1)
        seen: list[float] = []

        def fail() -> None:
            raise ZeroDivisionError

        if g.rank == 0:
            model.last = fail  # type: ignore[method-assign]
        try:
            fsdp(SIX)
        except ZeroDivisionError:
            assert g.rank == 0
        model.last = lambda: None  # type: ignore[method-assign]
        for block in blocks:
            forward = block.forward

            def look(x: Any, block: Any = block, forward: Any = forward) -> Any:
                seen.append(float(block.scales["a"].data[0]))
                return forward(x)

            block.forward = look  # type: ignore[method-assign]
        for _ in range(3):  # with an order that all have agreed on from the second pass on
            fsdp.backward(fsdp(SIX))
        return seen

    assert run_ranks(2, rank, config=HASTY) == [[1, 100, 10] * 3] * 2


@pytest.mark.parametrize("ahead", [0, 1])
def test_different_unit_orders_between_ranks_raise_mismatch(ahead: int) -> None:
    def rank(g: Group) -> str:
        fsdp, _, _ = ordered(g, *([0, 1, 2] if g.rank == 0 else [0, 2, 1]), ahead=ahead)
        with pytest.raises(CollectiveMismatch) as caught:
            fsdp.backward(fsdp(SIX))
        return str(caught.value)

    for text in run_ranks(2, rank, config=HASTY):
        assert "label=unit" in text


def test_an_update_after_a_prefetch_reaches_unsharded_units() -> None:
    def rank(g: Group) -> Any:
        kept = FSDP(Branches("a", a=scale(1, 2, 3, 4)), g, ShardingStrategy.SHARD_GRAD_OP)
        fsdp = FSDP(nn.Sequential(kept, FSDP(Branches("b", b=scale(1, 1, 1, 1)), g)), g)
        x = np.ones((1, 4))
        fsdp(x)
        fsdp.prefetch_forward_params()
        for _, piece in fsdp.named_parameters():
            piece.data = piece.data * 10
        return fsdp(x).tolist()

    assert run_ranks(2, rank, config=HASTY) == [[[100, 200, 300, 400]]] * 2


def test_a_load_refused_on_one_rank_does_not_desynchronize_a_prefetch() -> None:
    """Whatever each holds then: a prefetch from before is used by all, or by nobody."""

    def rank(g: Group) -> tuple[bool, Any]:
        fsdp = FSDP(Branches("a", a=scale(1, 2, 3, 4, 5)), g)
        fsdp(np.ones((1, 5)))
        fsdp.prefetch_forward_params()
        refused = False
        try:
            fsdp.update_shards(np.array([7.0, 8.0, 9.0]))  # rank 1 holds two
        except SizeMismatch:
            refused = True
        return refused, fsdp(np.ones((1, 5))).tolist()

    assert run_ranks(2, rank, config=HASTY) == [(False, [[7, 8, 9, 4, 5]]), (True, [[7, 8, 9, 4, 5]])]


@pytest.mark.parametrize("from_the_start", [True, False])
@each_strategy
def test_a_gradient_set_on_a_frozen_parameter_is_ignored(name: str, from_the_start: bool) -> None:
    def rank(g: Group) -> Any:
        frozen = scale(2, 2, requires_grad=not from_the_start)
        module = Branches("b", a=frozen, b=scale(1, 1))
        fsdp = FSDP(module, g, **chosen(name))
        fsdp.prepare()
        frozen.requires_grad = False
        frozen.grad = np.full(2, 5.0)
        fsdp(ONE)
        fsdp.backward(ONE)
        return fsdp.padded_gradients()["a"], fsdp.clip_grad_norm(100.0)

    assert run_ranks(2, rank, config=HASTY) == [(None, pytest.approx(np.sqrt(2)))] * 2


def test_refused_sync_arguments_keep_the_gradients() -> None:
    def rank(g: Group) -> Any:
        module = Branches("a", a=scale(1, 1))
        fsdp = FSDP(module, g)
        fsdp.backward(fsdp(ONE))
        before = fsdp.padded_gradients()["a"]
        module.scales["a"].grad = np.ones(2)
        with pytest.raises(ValueError, match="weight"):
            fsdp.sync_gradients(weight=-1)
        np.testing.assert_array_equal(fsdp.padded_gradients()["a"], before)

    run_ranks(2, rank, config=HASTY)


def test_units_with_equal_placement_share_their_groups() -> None:
    def rank(g: Group) -> None:
        units = []
        for _ in range(5):
            unit = FSDP(Branches("a", a=scale(1, 2)), g, ShardingStrategy.HYBRID_SHARD, 2)
            unit.prepare()  # one by one, as where the whole model fits nowhere
            units.append(unit)
        fsdp = FSDP(nn.Sequential(*units), g, ShardingStrategy.HYBRID_SHARD, 2)
        fsdp.backward(fsdp(ONE))
        SGD(fsdp, lr=0.1).step()
        assert len(g._core._parts) == 2

    run_ranks(4, rank, config=HASTY)
