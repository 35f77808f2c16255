"""Memory that is let go, orders that no random program finds, and misuse that is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from unit.parallel.helpers import Array, Branches, scale
from unit.parallel.sharding.models import HASTY, ONE, chosen, each_strategy, holding

from paceline import nn
from paceline._group import Group
from paceline._parallel import FSDP, Parameter, ShardingStrategy
from paceline._parallel.sharding._runner import MAX_SCATTERING
from paceline.errors import (
    DivergenceError,
    InvalidWorldSize,
    SettingsMismatch,
    SizeMismatch,
    StepOrderError,
    UnsupportedOp,
)
from paceline.optim import SGD, Adam
from paceline.testing import local_groups, run_groups, run_ranks

pytestmark = pytest.mark.slow

gathering = pytest.mark.parametrize("name", ["full", "hybrid2"])


# Memory.


class Seen(Branches):
    """Looked at in the middle of forward too."""

    look: Callable[[Branches], None]

    def forward(self, x: Array) -> Array:
        self.look(self)
        return super().forward(x)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@gathering
def test_at_most_ahead_plus_one_units_are_gathered_at_once(name: str, ahead: int) -> None:
    """Looked at in the middle of each unit's passes; a unit on its way counts."""

    def rank(g: Group) -> Any:
        blocks = [Seen("a", a=scale(1, 1)) for _ in range(6)]
        fsdp = FSDP(nn.Sequential(*(FSDP(b, g, **chosen(name)) for b in blocks)), g, ahead=ahead, **chosen(name))
        held, looked = [], []

        def look(block: Branches) -> None:
            flats = [flat for unit in fsdp._sharded.units() for flat in unit.flats]
            held.append(sum(flat.is_whole or flat._incoming is not None for flat in flats))
            looked.append(sum(path is not None for path in holding(fsdp)))
            assert block.scales["a"]._data is not None

        for block in blocks:
            block.look = look
            block.before_backward_of = lambda _, block=block: look(block)  # type: ignore[misc]
        for _ in range(3):
            fsdp(ONE)
            assert holding(fsdp) == []
            fsdp.backward(ONE)
            assert holding(fsdp) == []
        return max(held), max(looked), len(held)

    assert run_ranks(2, rank) == [(1 + ahead, 1, 36)] * 2


@pytest.mark.parametrize("name", ["full", "grad", "hybrid2"])
def test_number_of_unsharded_gradients_at_once_is_bounded(name: str) -> None:
    """In each unit's backward: those that are on their way to the ranks that keep parts, and the one at work."""

    def rank(g: Group) -> list[int]:
        blocks = [Branches("a", a=scale(1, 1)) for _ in range(8)]
        fsdp = FSDP(nn.Sequential(*(FSDP(b, g, **chosen(name)) for b in blocks)), g, **chosen(name))
        found = []

        def look(_: str) -> None:
            going = fsdp._sharded.runner()._reduction._going
            found.append(sum(one._first is not None for one in going) + 1)

        for block in blocks:
            block.before_backward_of = look
        for _ in range(2):
            fsdp(ONE)
            fsdp.backward(ONE)
        return found

    for found in run_ranks(2, rank):
        assert len(found) == 16
        assert max(found) == MAX_SCATTERING


# Prefetching.


@pytest.mark.parametrize("name", ["full", "hybrid1", "hybrid2"])
def test_a_thousand_prefetched_passes_of_equal_units_give_right_values(name: str) -> None:
    """Equal sizes: an array that is taken for another unit's would fit."""

    def rank(g: Group) -> None:
        scales = [scale(1.0 + n, 2.0 + n, 3.0 + n) for n in range(4)]
        model = nn.Sequential(*(FSDP(Branches("a", a=s), g, **chosen(name)) for s in scales))
        fsdp = FSDP(model, g, ahead=2, **chosen(name))
        whole = np.array([[24.0, 120.0, 360.0]])
        for number in range(1000):
            factor = np.ones(1) if number % 3 else np.full(1, 2.0)
            fsdp.prefetch_forward_params()
            assert fsdp.has_pending_prefetch()
            np.testing.assert_array_equal(fsdp(whole * factor), whole**2 * factor)
            assert not fsdp.has_pending_prefetch()

    run_ranks(2, rank)


@pytest.mark.parametrize("world", [2, 3])
def test_update_in_place_after_a_prefetch_reaches_all_ranks(world: int) -> None:
    """Also where only one rank's part has changed, or holds anything."""

    def rank(g: Group) -> Any:
        module = Branches("a", a=scale(1))
        fsdp = FSDP(module, g)
        optimizer = SGD(fsdp, lr=0.5)
        x = np.ones((1, 1))
        fsdp(x)
        fsdp.backward(x)
        fsdp.prefetch_forward_params()
        optimizer.step()
        return fsdp(x).tolist()

    assert run_ranks(world, rank, config=HASTY, timeout=10) == [[[0.5]]] * world


# Misuse.


@each_strategy
def test_a_unit_runs_only_inside_its_model(name: str) -> None:
    def rank(g: Group) -> None:
        unit = FSDP(Branches("a", a=scale(1, 1)), g, **chosen(name))
        fsdp = FSDP(nn.Sequential(nn.ReLU(), unit), g, **chosen(name))
        for _ in range(2):
            calls: list[Callable[[], Any]] = [
                lambda: unit(ONE),
                lambda: unit.backward(ONE),
                unit.sync_gradients,
                unit.state_dict,
                unit.sharded_state_dict,
                unit.prefetch_forward_params,
                unit.broadcast_updated_params,
                lambda: unit.load_state_dict({}),
                lambda: unit.load_sharded_state_dict({}),
                lambda: unit.update_shards(np.zeros(1)),
                lambda: unit.unshard().__enter__(),
            ]
            for call in calls:
                with pytest.raises(StepOrderError, match="wraps as a whole"):
                    call()
            fsdp(ONE)
            fsdp.backward(ONE)

    run_ranks(2, rank, config=HASTY)


@pytest.mark.parametrize("name", ["full", "grad", "hybrid2"])
def test_optimizer_of_the_bare_module_is_refused(name: str) -> None:
    def rank(g: Group) -> None:
        module = Branches("a", a=scale(1, 1))
        before = SGD(module, lr=0.1)
        fsdp = FSDP(module, g, **chosen(name))
        for _ in range(2):
            with pytest.raises(StepOrderError, match="wrap the module first"):
                before.step()
            with pytest.raises(StepOrderError, match="give the optimizer the wrapper"):
                Adam(module)
            fsdp(ONE)
            fsdp.backward(ONE)
            SGD(fsdp, lr=0.1).step()

    run_ranks(2, rank)


def test_values_of_sharded_parameters_cannot_be_read() -> None:
    def rank(g: Group) -> None:
        module = Branches("a", a=scale(1, 1))
        fsdp = FSDP(module, g)
        fsdp(ONE)
        with pytest.raises(StepOrderError, match="sharded over the ranks"):
            module.scales["a"].data  # noqa: B018
        with pytest.raises(StepOrderError, match="sharded over the ranks"):
            module.forward(ONE)
        with pytest.raises(SizeMismatch):
            fsdp.update_shards(np.zeros(5))

    run_ranks(2, rank)


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "ahead": (ValueError, "ahead", {"ahead": -1}),
    "strategy": (ValueError, "not a valid ShardingStrategy", {"strategy": "zero_3"}),
    "node size without nodes": (ValueError, "intra_node_size", {"intra_node_size": 1}),
    "nodes too large": (InvalidWorldSize, "multiple of intra_node_size", chosen("hybrid3")),
    "no nodes": (InvalidWorldSize, "multiple of intra_node_size", chosen("hybrid0")),
    "negative nodes": (InvalidWorldSize, "multiple of intra_node_size", chosen("hybrid-1")),
    "integer wire": (UnsupportedOp, "floating-point type", {"communication_dtype": np.int32}),
    "complex wire": (UnsupportedOp, ".", {"communication_dtype": np.complex64}),
    "text wire": (UnsupportedOp, ".", {"communication_dtype": "U3"}),
    "float8 wire": (UnsupportedOp, ".", {"communication_dtype": ml_dtypes.float8_e4m3fn}),
    "object wire": (UnsupportedOp, ".", {"communication_dtype": object}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_at_construction(what: str) -> None:
    """Refused when the wrapper is made, with the module as it was."""
    error, text, arguments = BAD[what]

    def rank(g: Group) -> None:
        module = Branches("a", a=scale(1, 1))
        with pytest.raises(error, match=text):
            FSDP(module, g, **arguments)
        assert SGD(module, lr=0.1)
        FSDP(module, g)(ONE)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("text", "parameter"),
    [
        ("float16", scale(1, dtype="f2")),
        ("int64", Parameter(np.array([1]))),
        ("objects", Parameter(np.array([None]), requires_grad=False)),
    ],
)
def test_parameters_that_cannot_be_trained_or_sent_are_refused(text: str, parameter: Parameter) -> None:
    def rank(g: Group) -> None:
        with pytest.raises(UnsupportedOp, match=f"'a' (is|holds) .*{text}"):
            FSDP(Branches("", b=scale(1), a=parameter), g)

    run_ranks(1, rank)


def test_parameters_of_another_unit_and_units_of_another_group_are_refused() -> None:
    def rank(g: Group) -> None:
        module = Branches("a", a=scale(1, 1))
        unit = FSDP(module, g)
        with pytest.raises(UnsupportedOp, match="another FSDP unit"):
            FSDP(module, g)
        with pytest.raises(ValueError, match="same group"):
            FSDP(nn.Sequential(unit), g.subgroup([0, 1]))
        FSDP(nn.Sequential(unit), g)(ONE)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("error", "text", "settings"),
    [
        (SettingsMismatch, "strategy", [{}, chosen("grad")]),
        (SettingsMismatch, "nodes", [chosen("hybrid1"), chosen("hybrid2")]),
        (SettingsMismatch, "communication_dtype", [{}, {"communication_dtype": "f4"}]),
        (SettingsMismatch, "ahead", [{}, {"ahead": 3}]),
    ],
)
def test_settings_that_differ_between_ranks_are_refused(
    error: type[Exception], text: str, settings: list[dict[str, Any]]
) -> None:
    def rank(g: Group) -> None:
        fsdp = FSDP(Branches("a", a=scale(1, 1)), g, **settings[g.rank])
        with pytest.raises(error, match=text):
            fsdp(ONE)

    run_ranks(2, rank, config=HASTY)


@pytest.mark.parametrize("other", ["size", "name", "units"])
def test_models_that_differ_between_ranks_are_refused(other: str) -> None:
    def rank(g: Group) -> None:
        odd = other if g.rank else ""
        blocks: list[Any] = [
            Branches("a", **{"c" if odd == "name" else "a": scale(1) if odd == "size" else scale(1, 1)}),
            Branches("b", b=scale(1, 1)),
        ]
        fsdp = FSDP(nn.Sequential(FSDP(blocks[0], g), blocks[1] if odd == "units" else FSDP(blocks[1], g)), g)
        expected = {"size": SizeMismatch, "name": DivergenceError, "units": SettingsMismatch}[other]
        with pytest.raises(expected):
            fsdp(ONE)

    run_ranks(2, rank, config=HASTY)


def test_construction_communicates_nothing() -> None:
    groups = local_groups(2)
    for strategy in ShardingStrategy:
        FSDP(Branches("a", a=scale(1, 1)), groups[0], strategy)  # the other rank has not come
    run_groups(groups, lambda g: g.barrier())
