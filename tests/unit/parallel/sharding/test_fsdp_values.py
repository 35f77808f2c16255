"""Gradients written by hand, norms of what is spread, narrow types on the wire, and buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from unit.parallel.helpers import Array, Branches, Weights, scale
from unit.parallel.sharding.models import (
    HASTY,
    ONE,
    cases,
    chosen,
    close,
    data,
    each_strategy,
    joined,
    layers,
    net,
    same_bits,
    squared,
    wrap,
)

from paceline._group import Group
from paceline._parallel import DDP, FSDP, Parameter
from paceline.errors import StepOrderError
from paceline.optim import SGD, Adam
from paceline.testing import run_ranks
from support.turns import by_turns

each_case = pytest.mark.parametrize(("world", "name"), cases(1, 2, 3, 4))


# By hand.


@each_case
def test_gradients_written_by_hand_are_averaged_by_weight(world: int, name: str) -> None:
    """Full gradients in the module's own parameters, with weights; b on the last rank only, c nowhere."""

    def rank(g: Group) -> Any:
        module = Branches("", a=scale(1, 1, 1), b=scale(1, dtype="f4"), c=scale(1), d=Parameter(np.zeros((0, 3))))
        fsdp = FSDP(module, g, **chosen(name))
        with pytest.raises(StepOrderError, match="nothing to reduce"):
            fsdp.sync_gradients()
        found = []
        for by in (lambda p, v: p.accumulate(v), lambda p, v: setattr(p, "grad", v)):
            module.scales["a"].grad = None
            SGD(fsdp, lr=0.1).zero_grad()
            by(module.scales["a"], np.array([1.0, 2.0, 3.0]) * (g.rank + 1))
            by(module.scales["d"], np.zeros((0, 3)))
            if g.rank == world - 1:
                by(module.scales["b"], [6.0])
            fsdp.sync_gradients(weight=float(g.rank + 1))
            found.append(fsdp.padded_gradients())
        return found

    ranks = run_ranks(world, rank, config=HASTY)
    total = sum(r + 1 for r in range(world))
    mean = sum((r + 1) ** 2 for r in range(world)) / total
    expected = {
        "a": np.array([1.0, 2.0, 3.0]) * mean,
        "b": np.array([6.0]) * world / total,
        "c": None,
        "d": np.zeros((0, 3)),
    }
    for n in range(2):
        close(joined([found[n] for found in ranks], name), expected, 1e-6)


@each_strategy
def test_gradients_written_by_hand_replace_earlier_gradients(name: str) -> None:
    """As the contract has it, whatever is spread; one that was not written stays."""

    def rank(g: Group) -> Any:
        module = Branches("", a=scale(1, 1))
        fsdp = FSDP(module, g, **chosen(name))
        for value in (3.0, 5.0):
            module.scales["a"].accumulate(np.array([value, value]) * g.rank)
            fsdp.sync_gradients(weight=1)
        return fsdp.padded_gradients()

    close(joined(run_ranks(2, rank, config=HASTY), name), {"a": np.array([2.5, 2.5])})


@each_strategy
def test_mixing_gradients_written_by_hand_with_backward_is_refused(name: str) -> None:
    def rank(g: Group) -> Any:
        module = Branches("a", a=scale(1, 1))
        fsdp = FSDP(module, g, **chosen(name))
        fsdp(ONE)
        module.scales["a"].accumulate([1.0, 1.0])
        with pytest.raises(StepOrderError, match="written outside"):
            fsdp.backward(ONE)
        module.scales["a"].grad = None
        with fsdp.no_sync():
            fsdp.backward(ONE)
        module.scales["a"].accumulate([1.0, 1.0])
        with pytest.raises(StepOrderError, match="in an accumulation"):
            fsdp.sync_gradients()

    run_ranks(2, rank, config=HASTY)


# Norms.


def p_norm(module: Any, p: float) -> float:
    values = np.concatenate([g.grad.ravel() for _, g in module.named_parameters()])
    return float(np.linalg.norm(values, p))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "full", "grad", "none", "hybrid1", "hybrid2"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_clip_grad_norm_equals_that_of_one_process(wrapper: str, world: int) -> None:
    x, t = data(8)
    module = net()
    module.backward(squared(module.forward(x), t)[1])
    plain = {path: p.grad for path, p in module.named_parameters()}
    if wrapper == "hybrid2" and world == 1:
        wrapper = "hybrid1"

    def rank(g: Group) -> Any:
        made: Any = DDP(net(), g) if wrapper == "ddp" else wrap(layers(), g, "some", **chosen(wrapper))
        rows, found = np.array_split(np.arange(8), world)[g.rank], []
        for p in (1, 1.5, 2, 3, math.inf):
            for limit in (0.01, 1e9, math.inf, 0.0):
                for _, parameter in made.named_parameters():
                    parameter.grad = None
                made.backward(squared(made(x[rows]), t[rows])[1])
                norm = made.clip_grad_norm(limit, p)
                pieces = {k: q.grad.copy() for k, q in made.named_parameters()}
                found.append((p, limit, norm, pieces if wrapper == "ddp" else made.padded_gradients()))
        return found

    for results in zip(*run_ranks(world, rank), strict=True):
        p, limit, norm, _ = results[0]
        assert {result[2] for result in results} == {norm}, "not the same bits on all ranks"
        assert norm == pytest.approx(p_norm(module, p), rel=1e-12)
        factor = min(1.0, limit / norm)
        found = joined([result[3] for result in results], "none" if wrapper == "ddp" else wrapper)
        close(found, {k: g * factor for k, g in plain.items()})


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@each_strategy
def test_a_non_finite_norm_leaves_gradients_unclipped_on_all_ranks(name: str, bad: float, p: float) -> None:
    """Only one element, on one rank, is bad."""

    def rank(g: Group) -> Any:
        module = Branches("", a=scale(1, 1, 1), b=scale(1, 1))
        fsdp = FSDP(module, g, **chosen(name))
        module.scales["a"].accumulate([4.0, 4.0, bad])
        module.scales["b"].accumulate([4.0, 4.0])
        fsdp.sync_gradients()
        return fsdp.clip_grad_norm(0.1, p), fsdp.padded_gradients()

    ranks = run_ranks(2, rank, config=HASTY)
    for norm, _ in ranks:
        np.testing.assert_equal(norm, bad)
    found = joined([gradients for _, gradients in ranks], name)
    close(found, {"a": np.array([4.0, 4.0, bad]), "b": np.array([4.0, 4.0])})


@each_strategy
def test_norm_without_gradients_is_zero_and_bad_arguments_are_refused(name: str) -> None:
    def rank(g: Group) -> Any:
        fsdp = FSDP(Branches("a", a=scale(1, 1), b=scale(1)), g, **chosen(name))
        fsdp(ONE)
        for limit, p in [(-1.0, 2.0), (1.0, 0.0), (1.0, -1.0), (math.nan, 2.0)]:
            with pytest.raises(ValueError, match="max_norm"):
                fsdp.clip_grad_norm(limit, p)
        return fsdp.clip_grad_norm(1.0)

    assert run_ranks(2, rank) == [0.0, 0.0]


# Narrow types on the wire.


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize(("world", "name", "units"), by_turns(cases(1, 2, 4), [("one",), ("some",)]))
def test_narrow_communication_dtype_rounds_within_its_precision(world: int, name: str, units: str, wire: str) -> None:
    """One step of plain SGD: off by at most the rounding of weights and gradients, and exact where nothing travels."""
    x, t = data(12, "float32")
    start = {path: p.data.copy() for path, p in net(0, "float32").named_parameters()}

    def rank(g: Group, dtype: Any) -> Any:
        fsdp = wrap(layers(g.rank, "float32"), g, units, communication_dtype=dtype, **chosen(name))
        optimizer = SGD(fsdp, lr=0.5)
        rows, states = np.array_split(np.arange(12), world)[g.rank], []
        for _ in range(2):
            fsdp.prepare()
            states.append(fsdp.state_dict())
            dy = squared(fsdp(x[rows]), t[rows])[1]
            fsdp.backward(dy)
            optimizer.step()
        return states, {q.data.dtype for _, q in fsdp.named_parameters()}

    type_ = np.dtype(getattr(ml_dtypes, wire, wire))
    narrow, full = run_ranks(world, lambda g: rank(g, type_)), run_ranks(world, lambda g: rank(g, None))
    for n in range(2):
        same_bits([states[n] for states, _ in narrow])
    same_bits([start, narrow[0][0][0]])  # masters keep their bits through agreement and a narrow gather
    assert narrow[0][1] == {np.dtype("float32")}
    if world == 1:
        same_bits([full[0][0][1], narrow[0][0][1]])
        return
    eps = 2.0**-8 if wire == "bfloat16" else 2.0**-11
    for path, values in full[0][0][1].items():
        error = np.abs(narrow[0][0][1][path] - values).max(initial=0.0)
        assert error <= 16 * eps, path
    moved = any((narrow[0][0][1][path] != values).any() for path, values in full[0][0][1].items())
    assert moved, "nothing was rounded: did it travel in the narrow type?"


@each_strategy
def test_master_weights_keep_updates_too_small_for_the_wire_dtype(name: str) -> None:
    """1 + 2**-12 is 1 in bfloat16; 32 such steps make 1 + 2**-7, which is not."""

    def rank(g: Group) -> Any:
        fsdp = FSDP(Branches("a", a=scale(1, 1, dtype="f4")), g, communication_dtype=ml_dtypes.bfloat16, **chosen(name))
        optimizer, outputs = SGD(fsdp, lr=2.0**-12), []
        x = np.ones((1, 2), np.float32)
        for _ in range(33):
            outputs.append(fsdp(x)[0, 0])
            optimizer.zero_grad()
            fsdp.backward(-x)
            optimizer.step()
        return outputs, fsdp.state_dict()["a"].tolist()

    for outputs, weights in run_ranks(2, rank):
        assert weights == [1 + 33 * 2.0**-12] * 2
        seen = 1 + 2.0**-12 if name in ("none", "hybrid1") else 1.0  # parameters do not travel there
        assert (outputs[1], outputs[32]) == (seen, 1 + 2.0**-7)


@each_strategy
def test_a_wire_dtype_that_is_not_narrower_gives_the_same_bits(name: str) -> None:
    def rank(g: Group, dtype: Any) -> Any:
        fsdp = wrap(layers(), g, "one", communication_dtype=dtype, **chosen(name))
        optimizer, (x, t) = Adam(fsdp), data(4)
        for _ in range(3):
            fsdp.backward(squared(fsdp(x), t)[1])
            optimizer.step()
        return fsdp.state_dict()

    same_bits([*run_ranks(2, lambda g: rank(g, None)), *run_ranks(2, lambda g: rank(g, np.float64))])


@each_strategy
def test_frozen_integers_and_halves_stay_exact_with_a_narrow_wire(name: str) -> None:
    numbers: Weights = {
        "i": np.arange(5) + 2**40,
        "h": np.linspace(0, 1, 7).astype(np.float16),
        "t": np.array([True, False]),
    }

    def rank(g: Group) -> Any:
        scales = {k: Parameter(v if g.rank == 0 else np.zeros_like(v), requires_grad=False) for k, v in numbers.items()}
        fsdp = FSDP(Branches("a", a=scale(1, 1), **scales), g, communication_dtype=ml_dtypes.bfloat16, **chosen(name))
        fsdp(ONE)
        with fsdp.unshard():
            return {k: p.data.copy() for k, p in scales.items()}, fsdp.state_dict()

    for inside, state in run_ranks(2, rank):
        same_bits([numbers, inside])
        same_bits([numbers, {k: state[k] for k in numbers}])


# Buffers.


class Counting(Branches):
    """Adds up what it has seen in a buffer."""

    def __init__(self, **scales: Parameter) -> None:
        super().__init__("a", **scales)
        self.seen = np.zeros(3, np.int64)

    def named_buffers(self) -> Iterator[tuple[str, Array]]:
        yield "seen", self.seen

    def forward(self, x: Array) -> Array:
        self.seen += int(x[0, 0])
        return super().forward(x)


@pytest.mark.parametrize("inside", [False, True])
@each_strategy
def test_buffers_take_the_values_of_rank_0(name: str, inside: bool) -> None:
    def rank(g: Group) -> Any:
        module = Counting(a=scale(1, 1))
        module.seen += g.rank + 7
        fsdp = FSDP(FSDP(module, g, **chosen(name)) if inside else module, g, **chosen(name))
        for _ in range(2):
            fsdp(np.full((1, 2), g.rank + 1.0))
            fsdp.backward(ONE)
        saved = fsdp.state_dict()
        module.seen[:] = 0
        assert saved["seen"].tolist() == [9, 9, 9]
        fsdp.load_state_dict(saved)
        assert module.seen.tolist() == [9, 9, 9]
        shard = fsdp.sharded_state_dict()
        module.seen[:] = 0
        fsdp.load_sharded_state_dict(shard)
        return module.seen.tolist(), dict(fsdp.named_buffers())["seen"] is module.seen

    assert run_ranks(2, rank) == [([9, 9, 9], True)] * 2
