"""Buckets live in memory of the group's that stays: a step takes none, nor does a failure or a new generation."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Array, Branches, DoneWork, RecordingGroup, gradient, mlp, run_open, scale

from paceline._group import Group
from paceline._links.base import Peer
from paceline._parallel import DDP, Parameter
from paceline.optim import SGD
from paceline.testing import local_groups, next_generation, run_groups, run_ranks

N = 1 << 20


class Constant:
    """Parameters whose gradients are there already: whatever else a step allocates is the wrapper's."""

    def __init__(self, count: int, dtype: Any = np.float32) -> None:
        self.parameters = [Parameter(np.zeros(N, dtype)) for _ in range(count)]
        self.gradient = np.arange(N, dtype=dtype)

    def named_parameters(self) -> Any:
        for number, parameter in enumerate(self.parameters):
            yield f"{number}", parameter

    def forward(self, x: Array) -> Array:
        return x

    def backward(self, dy: Array) -> Array:
        for parameter in reversed(self.parameters):
            parameter.accumulate(self.gradient)
        return dy


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "bf16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_allocates_no_memory_of_the_size_of_gradients(compression: str | None, dtype: str) -> None:
    peaks: list[int] = []
    world = 2

    def rank(g: Group) -> None:
        ddp = DDP(Constant(3, dtype), g, bucket_mb=4, compression=compression)
        optimizer = SGD(ddp, lr=0.0)
        x = np.ones((1, 1))
        for _ in range(4):
            g.barrier()
            if g.rank == 0:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
            g.barrier()
            optimizer.zero_grad()
            ddp(x)
            ddp.backward(x, 0.25 + g.rank)
            optimizer.step()
            g.barrier()
            if g.rank == 0:
                peaks.append(tracemalloc.get_traced_memory()[1] - before)

    tracemalloc.start()
    try:
        run_ranks(world, rank)
    finally:
        tracemalloc.stop()
    pieces = world * (3 << 20) if compression else 0  # five or six of 64 Ki elements, at each rank
    assert peaks[-1] < 200_000 + pieces < 3 * N * 4


def homes(ddp: DDP) -> list[int]:
    assert ddp._model.reducer is not None
    return [bucket.flat.ctypes.data for bucket in ddp._model.reducer.buckets]


def test_bucket_memory_is_reused_after_failures_and_new_generations() -> None:
    groups = local_groups(2)
    made: list[list[int]] = [[], []]
    ddps = [DDP(mlp(), g, bucket_mb=600 / 2**20) for g in groups]
    for g in groups:

        def empty(shape: Any, dtype: Any = np.float32, made: list[int] = made[g.rank]) -> Array:
            made.append(int(shape))
            return np.full(shape, np.nan, dtype)

        g.empty = empty  # type: ignore[method-assign]
    found: list[list[int]] = [[], []]

    def use(g: Group) -> None:
        ddp = ddps[g.rank]
        for _ in range(3):
            SGD(ddp, lr=0.1).zero_grad()
            ddp(np.ones((2, 12)))
            ddp.backward(np.ones((2, 5)))
            assert all(np.isfinite(gradient(p)).all() for _, p in ddp.named_parameters())
        ddp.drop_gradients()
        found[g.rank].append(hash(tuple(homes(ddp))))

    run_open(groups, use)
    next_generation(groups)
    run_groups(groups, use)
    for rank in (0, 1):
        assert len(found[rank]) == 2
        assert len(set(found[rank])) == 1
        assert len(made[rank]) == len(homes(ddps[rank]))  # once for each bucket


@dataclass
class SlowWork(DoneWork):
    over: bool = False

    def wait(self, timeout: float | None = None) -> Array:
        raise ConnectionError("as ordered")

    def done(self) -> bool:
        return self.over


@dataclass
class SlowGroup(RecordingGroup):
    """All reductions fail; those behind the caller still run until the test says that they are over."""

    works: list[SlowWork] = field(default_factory=list)
    divisors: list[Any] = field(default_factory=list)

    def all_reduce(
        self, x: Array, *, op: Any = "sum", out: Any = None, divisor: Any = None, async_op: Any = False
    ) -> Any:
        if out is None:
            return super().all_reduce(x, op=op)
        if not async_op:
            raise ConnectionError("as ordered")
        self.works.append(SlowWork(out))
        if divisor is not None:
            self.divisors.append(divisor)
        return self.works[-1]


def test_a_running_reduction_keeps_its_divisor() -> None:
    group = SlowGroup()
    ddp = DDP(Branches("abc", a=scale(2.0), b=scale(3.0), c=scale(4.0)), group, bucket_mb=1e-6)

    def attempt(weight: float) -> None:
        ddp(np.ones((1, 1)))
        with pytest.raises(ConnectionError):
            ddp.backward(np.ones((1, 1)), weight)

    attempt(0.25)  # learns how often each parameter is used, and sends all at the end
    for work in group.works:
        work.over = True
    group.works.clear()
    group.divisors.clear()
    attempt(0.25)
    first, second, third = group.works
    first.over = third.over = True  # another rank may still wait for the second
    attempt(0.75)
    assert group.divisors[0]() == 0.25
    assert group.works[3].result is not first.result
    second.over = True
    attempt(0.5)
    assert group.divisors[2]() == 0.75


@pytest.mark.parametrize("over", [False, True])
def test_memory_of_a_running_reduction_is_not_reused(over: bool) -> None:
    group = SlowGroup()
    ddp = DDP(Branches("ab", a=scale(2.0), b=scale(3.0)), group, bucket_mb=1e-6)

    def attempt() -> None:
        ddp(np.ones((1, 1)))
        with pytest.raises(ConnectionError):
            ddp.backward(np.ones((1, 1)))
        assert all(p.grad is None for _, p in ddp.named_parameters())

    attempt()
    sent = group.works[0].result.copy()
    ddp.module.scales["b"].accumulate([7.0])  # type: ignore[attr-defined]
    np.testing.assert_array_equal(group.works[0].result, sent)  # nothing is written there, whoever writes
    ddp.drop_gradients()
    group.works[0].over = over
    attempt()
    assert (group.works[1].result is group.works[0].result) is over
    if not over:
        np.testing.assert_array_equal(group.works[0].result, sent)
    for work in group.works:
        work.over = True
    with ddp.no_sync():
        ddp(np.ones((1, 1)))
        ddp.backward(np.ones((1, 1)))
    assert ddp._model.reducer is not None
    for (_, parameter), bucket in zip(ddp.named_parameters(), reversed(ddp._model.reducer.buckets), strict=True):
        assert parameter.grad is not None
        assert np.shares_memory(parameter.grad, bucket.flat)  # at home again


def test_a_running_reduction_keeps_its_memory_when_buckets_are_rebuilt() -> None:
    """Another host comes, so the default size of buckets is another."""
    group = SlowGroup(members=(Peer(0, "a", "here", node="n"), Peer(1, "b", "here", node="n")))
    ddp = DDP(Constant(1, "float64"), group)

    def attempt() -> None:
        ddp(np.ones((1, 1)))
        with pytest.raises(ConnectionError):
            ddp.backward(np.ones((1, 1)))

    attempt()  # learns how often each parameter is used
    attempt()
    sent = [work.result.copy() for work in group.works]
    group.generation, group.members = 2, (group.members[0], Peer(1, "b", "there", node="m"))
    attempt()  # learns anew
    attempt()
    first, second = group.works
    assert first.result is not second.result
    np.testing.assert_array_equal(first.result, sent[0])
