"""What `backward` leaves in the gradients under every strategy, and the norm of what is spread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Array, Branches, scale
from unit.parallel.sharding.models import (
    HASTY,
    ONE,
    Gradients,
    cases,
    chosen,
    close,
    data,
    each_strategy,
    joined,
    layers,
    net,
    same_bits,
    shard_size,
    squared,
    wrap,
)

from paceline import nn
from paceline._group import Group
from paceline._parallel import FSDP, Parameter
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.optim import SGD
from paceline.testing import run_ranks

UNEVEN = {1: [1, 20], 2: [1, 12, 30, 31, 59], 4: [1, 12, 14, 40, 41, 58, 59]}
"""Where 60 samples are cut, into 3, 3 and 2 micro-batches for each rank."""
each_case = pytest.mark.parametrize(("world", "name"), cases(1, 2, 4))


def expected_gradients(x: Array, t: Array, times: int = 1) -> Gradients:
    """Of one process for one batch, added up."""
    module = net()
    for _ in range(times):
        module.backward(squared(module.forward(x), t)[1])
    return {path: p.grad for path, p in module.named_parameters()}


def whole(fsdp: FSDP, group: Group, name: str) -> Gradients:
    """All gradients, on every rank."""
    mine = fsdp.padded_gradients()
    copies = group.size // shard_size(name, group.size)
    return {k: None if g is None else np.asarray(group.all_reduce(g)) / copies for k, g in mine.items()}


def step(fsdp: Any, x: Array, dy: Array = ONE, weight: float | None = None) -> None:
    fsdp(x)
    fsdp.backward(dy, weight)


@each_case
@pytest.mark.parametrize("explicit", [False, True])
def test_accumulation_in_no_sync_equals_one_big_batch(world: int, name: str, explicit: bool) -> None:
    x, t = data(60)

    def rank(g: Group) -> Any:
        fsdp = wrap(layers(), g, "some", **chosen(name))
        optimizer, found = SGD(fsdp, lr=0.1), []
        mine = np.split(np.arange(60), UNEVEN[world])

        def micro_batch(number: int) -> None:
            rows = mine[count * g.rank + number]
            fsdp.backward(squared(fsdp(x[rows]), t[rows])[1])

        count = len(mine) // world
        for _ in range(2):
            optimizer.zero_grad()
            with fsdp.no_sync():
                for number in range(count if explicit else count - 1):
                    micro_batch(number)
            if not explicit:
                micro_batch(count - 1)
            fsdp.sync_gradients()  # nothing is pending after the implicit form
            found.append(fsdp.padded_gradients())
        same_bits([{k: v for k, v in one.items() if v is not None} for one in found])
        return found[-1]

    close(joined(run_ranks(world, rank), name), expected_gradients(x, t))


@each_strategy
@pytest.mark.parametrize("units", [False, True])
def test_unused_parameters_get_no_gradient_and_no_update(name: str, units: bool) -> None:
    """`a` by all, `b` by rank 0 only, `c` by nobody, and which of them changes from step to step."""

    def rank(g: Group) -> Any:
        module = Branches("", a=scale(1, 1), b=scale(1, 1), c=scale(1, 1))
        inside: Any = FSDP(module, g, **chosen(name)) if units else module
        fsdp = FSDP(nn.Sequential(nn.ReLU(), inside), g, **chosen(name))
        optimizer = SGD(fsdp, lr=0.1, momentum=0.9, weight_decay=0.1)
        found = []
        for used in ("abc", "acb", "bca"):  # by all, by rank 0, by nobody
            module.use = used[:2] if g.rank == 0 else used[0]
            optimizer.zero_grad()
            step(fsdp, ONE)
            gradients, before = whole(fsdp, g, name), fsdp.state_dict()
            optimizer.step()
            after = fsdp.state_dict()
            np.testing.assert_array_equal(after[f"1.{used[2]}"], before[f"1.{used[2]}"])  # no decay, no momentum
            found.append([gradients[f"1.{path}"] for path in used])
        return found, fsdp.state_dict()

    first, second = run_ranks(2, rank)
    np.testing.assert_equal(first, second)
    assert all(step[2] is None and step[1] is not None and step[0] is not None for step in first[0])
    np.testing.assert_array_equal(first[0][0][1], [0.5, 0.5])  # rank 1 sent zeros


@each_strategy
@pytest.mark.parametrize("through", ["module", "pieces"])
@pytest.mark.parametrize("used_before", [False, True])
def test_freezing_and_unfreezing_take_effect_in_the_next_pass(name: str, through: str, used_before: bool) -> None:
    """In the module or by `fsdp.named_parameters()`, before the first pass or between steps."""

    def rank(g: Group) -> Any:
        module = Branches("ab", a=scale(2, 2, requires_grad=False), b=scale(1, 1))
        fsdp = FSDP(module, g, **chosen(name))
        if used_before:
            step(fsdp, ONE)
            for _, p in fsdp.named_parameters():
                p.grad = None
        changed = dict(fsdp.named_parameters()) if through == "pieces" else module.scales
        changed["a"].requires_grad = True
        changed["b"].requires_grad = False
        step(fsdp, ONE * g.rank)
        found = whole(fsdp, g, name)
        flags = {p.requires_grad for p in (module.scales["b"], dict(fsdp.named_parameters())["b"])}
        return {path: None if v is None else v.tolist() for path, v in found.items()}, flags

    assert run_ranks(2, rank) == [({"a": [0.5, 0.5], "b": None}, {False})] * 2


@each_strategy
def test_freezing_in_the_middle_of_an_accumulation_is_refused(name: str) -> None:
    def rank(g: Group) -> None:
        module = Branches("ab", a=scale(2, 2), b=scale(1, 1))
        fsdp = FSDP(module, g, **chosen(name))
        with fsdp.no_sync():
            step(fsdp, ONE)
        module.scales["b"].requires_grad = False
        with pytest.raises(StepOrderError, match="frozen or unfrozen"):
            fsdp(ONE)

    run_ranks(2, rank)


@each_strategy
def test_gradient_from_before_a_freeze_is_not_reduced_again(name: str) -> None:
    """It is kept, as under DDP, or dropped; nothing else can be right."""

    def rank(g: Group) -> Any:
        module = Branches("ab", a=scale(2, 2), b=scale(1, 1))
        fsdp = FSDP(module, g, **chosen(name))
        step(fsdp, ONE, weight=3.0)
        module.scales["b"].requires_grad = False
        step(fsdp, ONE, weight=3.0)
        return {path: None if v is None else v.tolist() for path, v in whole(fsdp, g, name).items()}

    for found in run_ranks(2, rank):
        assert found["a"] == [2.0, 2.0]
        assert found["b"] in (None, [2.0, 2.0])


@each_case
def test_parameter_tied_across_units_is_refused(world: int, name: str) -> None:
    def rank(g: Group) -> None:
        shared = scale(3, 3)
        first = FSDP(Branches("a", a=shared), g, **chosen(name))
        with pytest.raises(UnsupportedOp, match="tied"):
            FSDP(nn.Sequential(first, FSDP(Branches("b", b=shared), g, **chosen(name))), g, **chosen(name))

    run_ranks(world, rank)


class Twice:
    """The same module two times. `again`: backward runs forward anew, as where activations are not kept."""

    def __init__(self, inner: Any, scales: Branches, *, again: bool) -> None:
        self.inner, self.scales, self.again = inner, scales, again

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.inner.named_parameters()

    def forward(self, x: Array) -> Array:
        self._x = x
        self._y = self.inner.forward(x)
        return self.inner.forward(self._y)  # type: ignore[no-any-return]

    def backward(self, dy: Array) -> Array:
        for x in (self._y, self._x):
            if self.again:
                self.inner.forward(x)
            self.scales._inputs = [x]
            dy = self.inner.backward(dy)
        return dy


@each_strategy
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("how", ["once", "fails and tries again", "twice"])
def test_a_unit_used_twice_in_a_pass_gets_the_right_gradient(name: str, how: str, again: bool) -> None:
    """y = w * w * x; backward may be called again without another forward pass."""

    def rank(g: Group) -> Any:
        scales = Branches("a", a=scale(3, 3))
        fsdp = FSDP(Twice(FSDP(scales, g, **chosen(name)), scales, again=again), g, **chosen(name))
        optimizer, found, calls = SGD(fsdp, lr=0.5), [], []

        def fail_at_second(name: str) -> None:
            calls.append(name)
            if len(calls) == 2:
                raise ZeroDivisionError("as ordered")

        for _ in range(3):
            optimizer.zero_grad()
            fsdp(ONE * g.rank * 2)
            if how == "fails and tries again":
                calls.clear()
                scales.before_backward_of = fail_at_second
                with pytest.raises(ZeroDivisionError):
                    fsdp.backward(ONE)
                scales.before_backward_of = lambda name: None
            elif how == "twice":
                fsdp.backward(ONE)
            fsdp.backward(ONE)
            found += [v.tolist() for v in whole(fsdp, g, name).values() if v is not None]
        return found

    total = 12.0 if how == "twice" else 6.0
    assert run_ranks(2, rank, config=HASTY) == [[[total, total]] * 3] * 2
