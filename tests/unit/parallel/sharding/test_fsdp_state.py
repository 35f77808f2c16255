"""State in and out: across worlds and strategies, into the bare module, refused, and inside `unshard`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from unit.parallel.helpers import Branches, Weights, scale
from unit.parallel.sharding.models import (
    HASTY,
    cases,
    chosen,
    data,
    each_strategy,
    holding,
    inside,
    layers,
    net,
    same_bits,
    shard_size,
    squared,
    strategies,
    wrap,
)

from paceline._group import Group
from paceline._parallel import FSDP
from paceline.errors import InvalidRank, SizeMismatch, StepOrderError
from paceline.optim import SGD
from paceline.testing import run_ranks

each_case = pytest.mark.parametrize(("world", "name"), cases(1, 2, 3))
INPUTS = data(4)[0]


def train(fsdp: FSDP, optimizer: SGD, steps: int = 2) -> None:
    x, t = data(4)
    for _ in range(steps):
        optimizer.zero_grad()
        fsdp.backward(squared(fsdp(x), t)[1])
        optimizer.step()


def trained(g: Group, name: str, units: str = "some", **settings: Any) -> FSDP:
    fsdp = wrap(layers(), g, units, **chosen(name), **settings)
    train(fsdp, SGD(fsdp, lr=0.1))
    return fsdp


def whole(fsdp: FSDP) -> Weights:
    """The module's own values."""
    return {path: p.data.copy() for path, p in inside(fsdp).items()}


def outputs(state: Weights) -> Any:
    """What the bare module makes of the inputs with these values."""
    bare = net()
    for path, p in bare.named_parameters():
        assert state[path].shape == p.shape
        p.data = state[path]
    return bare.forward(INPUTS)


# Full states.


@pytest.mark.slow
@pytest.mark.parametrize("source", strategies(4))
def test_state_of_four_ranks_loads_in_any_world_and_strategy(source: str) -> None:
    saved = run_ranks(4, lambda g: trained(g, source).state_dict())
    same_bits(saved)
    expected = outputs(saved[0])

    def rank(g: Group, name: str, used: bool) -> Any:
        fsdp = trained(g, name, "each") if used else wrap(layers(9), g, "one", **chosen(name))
        fsdp.load_state_dict(saved[0])
        return fsdp.state_dict(), fsdp(INPUTS)

    for world, name in cases(1, 2, 3):
        for used in (False, True):
            for state, y in run_ranks(world, lambda g, name=name, used=used: rank(g, name, used)):  # type: ignore[misc]
                same_bits([saved[0], state])
                np.testing.assert_array_equal(y, expected)


@each_case
def test_state_dict_is_a_copy_given_only_to_the_root(world: int, name: str) -> None:
    def rank(g: Group) -> Any:
        fsdp = trained(g, name)
        before, wanted = fsdp.state_dict(), fsdp.state_dict(root=world - 1)
        for values in wanted.values():
            values[...] = 0
        same_bits([before, fsdp.state_dict()])
        with pytest.raises(InvalidRank):
            fsdp.state_dict(root=world)
        with pytest.raises(InvalidRank):
            fsdp.state_dict(root=-1)
        return list(wanted), list(before)

    for number, (wanted, everything) in enumerate(run_ranks(world, rank)):
        assert wanted == (everything if number == world - 1 else [])
        assert everything == [path for path, _ in net().named_parameters()]


@each_strategy
@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "several"])
def test_full_state_that_does_not_fit_changes_nothing(name: str, damage: str) -> None:
    def rank(g: Group) -> None:
        fsdp = trained(g, name)
        before = fsdp.state_dict()
        bad = {path: values + 1 for path, values in before.items()}
        if damage in ("missing", "several"):
            del bad["0.bias"]
        if damage in ("unexpected", "several"):
            bad["7.bias"] = np.zeros(2)
        if damage in ("shape", "several"):
            bad["2.weight"] = bad["2.weight"].T
        with pytest.raises(SizeMismatch) as caught:
            fsdp.load_state_dict(bad)
        texts = {"missing": "'0.bias' is missing", "unexpected": "'7.bias' is unexpected", "shape": "'2.weight'"}
        assert all(text in str(caught.value) for key, text in texts.items() if damage in (key, "several"))
        same_bits([before, fsdp.state_dict()])

    run_ranks(2, rank)


@each_strategy
def test_a_refused_load_on_one_rank_keeps_a_pending_prefetch(name: str) -> None:
    """Nothing was changed, so the ranks still expect the same."""

    def rank(g: Group) -> Any:
        fsdp = trained(g, name)
        state = fsdp.state_dict()
        if name in ("full", "hybrid1", "hybrid2"):
            fsdp.prefetch_forward_params()
        if g.rank == 0:
            with pytest.raises(SizeMismatch):
                fsdp.update_shards(np.zeros(1))
            with pytest.raises(SizeMismatch):
                fsdp.load_state_dict({})
            with pytest.raises(SizeMismatch):
                fsdp.load_sharded_state_dict({})
        return state, fsdp(INPUTS), fsdp.state_dict()

    for before, y, after in run_ranks(2, rank, config=HASTY, timeout=10):
        np.testing.assert_array_equal(y, outputs(before))
        same_bits([before, after])


# Sharded states.


@each_case
@pytest.mark.parametrize("used", [False, True])
def test_sharded_state_round_trip(world: int, name: str, used: bool) -> None:
    """Also before the first forward pass, where the other ranks' values would be rank 0's."""

    def rank(g: Group) -> Any:
        fsdp = trained(g, name)
        shard, full = copy.deepcopy(fsdp.sharded_state_dict()), fsdp.state_dict()
        other = trained(g, name) if used else wrap(layers(g.rank + 5), g, "some", **chosen(name))
        other.load_sharded_state_dict(shard)
        other(INPUTS)
        return shard, full, other.state_dict(), other.sharded_state_dict()

    ranks = run_ranks(world, rank)
    for shard, full, loaded, again in ranks:
        same_bits([full, loaded])
        assert {p: e["values"].tobytes() for p, e in shard.items()} == {
            p: e["values"].tobytes() for p, e in again.items()
        }
        for path, entry in shard.items():
            values = full[path].reshape(-1)[entry["start"] : entry["start"] + entry["values"].size]
            assert tuple(entry["shape"]) == full[path].shape
            assert values.tobytes() == entry["values"].tobytes()
    counted = sum(entry["values"].size for shard, *_ in ranks for entry in shard.values())
    total = sum(values.size for values in ranks[0][1].values())
    assert counted == total * world // shard_size(name, world)


@pytest.mark.parametrize(("world", "name"), [(1, "full"), (3, "full"), (3, "grad"), (2, "none"), (2, "hybrid1")])
def test_sharded_state_of_another_world_is_refused(world: int, name: str) -> None:
    shards = run_ranks(2, lambda g: trained(g, "full").sharded_state_dict())

    def rank(g: Group) -> None:
        fsdp = trained(g, name)
        before = fsdp.state_dict()
        with pytest.raises(SizeMismatch, match=r"'0\.weight' is .* not .*world, rank and strategy"):
            fsdp.load_sharded_state_dict(shards[min(g.rank, 1)])
        same_bits([before, fsdp.state_dict()])

    run_ranks(world, rank)


def test_sharded_state_of_another_rank_is_refused() -> None:
    shards = run_ranks(2, lambda g: trained(g, "full").sharded_state_dict())

    def rank(g: Group) -> None:
        with pytest.raises(SizeMismatch, match="rank"):
            trained(g, "full").load_sharded_state_dict(shards[1 - g.rank])

    run_ranks(2, rank)


# Before the first forward pass.


@each_case
@pytest.mark.parametrize("how", ["load_state_dict", "update_shards", "load_sharded_state_dict"])
def test_state_loaded_before_the_first_pass_survives_the_agreement(world: int, name: str, how: str) -> None:
    wanted = {path: p.data + 0.5 for path, p in net().named_parameters()}

    def rank(g: Group) -> Weights:
        fsdp = wrap(layers(g.rank + 1), g, "each", **chosen(name))
        if how == "load_state_dict":
            fsdp.load_state_dict(wanted)
        else:
            shard = fsdp.sharded_state_dict()
            for path, entry in shard.items():
                start = entry["start"]
                entry["values"] = wanted[path].reshape(-1)[start : start + entry["values"].size]
            if how == "update_shards":
                flat = [shard[path]["values"] for path, _ in fsdp.named_parameters()]
                fsdp.update_shards(np.concatenate(flat))
            else:
                fsdp.load_sharded_state_dict(shard)
        fsdp(INPUTS)
        return fsdp.state_dict()

    for state in run_ranks(world, rank):
        same_bits([wanted, state])


# unshard.


@each_case
@pytest.mark.parametrize("wire", [None, ml_dtypes.bfloat16])
def test_unshard_shows_exact_values_and_keeps_changes(world: int, name: str, wire: Any) -> None:
    def rank(g: Group) -> None:
        fsdp = trained(g, name, communication_dtype=wire)
        before = fsdp.state_dict()
        with fsdp.unshard():
            same_bits([before, whole(fsdp)])
            y = fsdp(INPUTS)
            np.testing.assert_array_equal(y, outputs(before))
            same_bits([before, whole(fsdp)])
            for p in inside(fsdp).values():
                p.data[...] *= 3
            for call in (lambda: fsdp.backward(y), lambda: fsdp.sync_gradients(weight=1)):
                with pytest.raises(StepOrderError, match="unshard"):
                    call()
            changes: list[Callable[[], None]] = [
                lambda: fsdp.load_state_dict(before),
                lambda: fsdp.update_shards(np.zeros(3)),
                lambda: fsdp.load_sharded_state_dict(fsdp.sharded_state_dict()),
            ]
            for call in changes:
                with pytest.raises(StepOrderError, match="inside unshard"):
                    call()
        after = {path: values * 3 for path, values in before.items()}
        same_bits([after, fsdp.state_dict()])
        assert name == "grad" or not holding(fsdp)
        np.testing.assert_allclose(fsdp(INPUTS), outputs(after), rtol=0.1 if wire else 1e-12, atol=0.1)
        train(fsdp, SGD(fsdp, lr=0.1), 1)

    run_ranks(world, rank)


@each_strategy
def test_state_dict_inside_unshard_includes_changes_made_there(name: str) -> None:
    def rank(g: Group) -> Any:
        fsdp = FSDP(Branches("a", a=scale(1, 2, 3)), g, **chosen(name))
        with fsdp.unshard():
            fsdp.module.scales["a"].data[...] = [4, 5, 6]  # type: ignore[attr-defined]
            inside = fsdp.state_dict()["a"].tolist()
        return inside, fsdp.state_dict()["a"].tolist()

    assert run_ranks(2, rank) == [([4, 5, 6], [4, 5, 6])] * 2


@each_strategy
def test_nested_unshard_keeps_changes(name: str) -> None:
    """Refused, or as if it was not there."""

    def rank(g: Group) -> Any:
        fsdp = FSDP(Branches("a", a=scale(1, 2, 3)), g, **chosen(name))
        values = fsdp.module.scales["a"]  # type: ignore[attr-defined]
        with fsdp.unshard():
            values.data[0] = 7
            try:
                with fsdp.unshard():
                    seen = values.data.tolist()
            except StepOrderError:
                seen = values.data.tolist()
            values.data[1] = 8
        return seen, fsdp.state_dict()["a"].tolist()

    assert run_ranks(2, rank) == [([7, 2, 3], [7, 8, 3])] * 2


@pytest.mark.parametrize("wire", [None, ml_dtypes.bfloat16])
@each_strategy
def test_broadcast_and_prefetch_inside_unshard_keep_exact_values(name: str, wire: Any) -> None:
    def rank(g: Group) -> None:
        fsdp = trained(g, name, communication_dtype=wire)
        before = fsdp.state_dict()
        with fsdp.unshard():
            fsdp.broadcast_updated_params()
            same_bits([before, whole(fsdp)])
            if name in ("full", "hybrid1", "hybrid2"):
                fsdp.prefetch_forward_params()
        assert not fsdp.has_pending_prefetch()
        same_bits([before, fsdp.state_dict()])

    run_ranks(2, rank)


@each_strategy
def test_error_inside_unshard_leaves_the_state_unchanged(name: str) -> None:
    def rank(g: Group) -> None:
        fsdp = trained(g, name)
        before = fsdp.state_dict()
        with pytest.raises(ZeroDivisionError), fsdp.unshard():
            raise ZeroDivisionError
        same_bits([before, fsdp.state_dict()])
        assert name == "grad" or not holding(fsdp)
        train(fsdp, SGD(fsdp, lr=0.1), 1)

    run_ranks(2, rank)


@each_strategy
@pytest.mark.parametrize("wire", [None, ml_dtypes.bfloat16])
def test_optimizer_step_inside_unshard_is_kept(name: str, wire: Any) -> None:
    """Gradients are from before; what the optimizer does to the pieces must survive the end of the block."""

    def rank(g: Group) -> Any:
        fsdp = FSDP(Branches("a", a=scale(1, 2, 3)), g, communication_dtype=wire, **chosen(name))
        optimizer = SGD(fsdp, lr=1.0)
        fsdp(np.ones((1, 3)))
        fsdp.backward(np.ones((1, 3)))
        with fsdp.unshard():
            optimizer.step()
        return fsdp.state_dict()["a"].tolist(), fsdp(np.ones((1, 3))).tolist()

    assert run_ranks(2, rank) == [([0, 1, 2], [[0, 1, 2]])] * 2
