"""What `backward` leaves in the gradients: means by weight, and what becomes of unused, frozen and tied parameters."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Array, Branches, gradient, gradients, mlp, samples, scale

from paceline import nn
from paceline._group import Group
from paceline._parallel import DDP, Parameter
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.optim import SGD
from paceline.testing import run_ranks

ONES = np.ones((1, 2))


def step(ddp: DDP, x: Array, dy: Array, weight: float | None = None) -> dict[str, Array | None]:
    ddp(x)
    ddp.backward(dy, weight)
    return gradients(ddp)


def test_gradient_mean_is_weighted_by_samples() -> None:
    def rank(g: Group) -> Any:
        ddp = DDP(Branches("a", a=scale(1.0)), g)
        rows = g.rank + 1  # 1, 2 and 3 samples of value 1, 2 and 3; dy is that of the mean over them
        return step(ddp, np.full((rows, 1), rows * 1.0), np.full((rows, 1), 1 / rows))["a"]

    assert run_ranks(3, rank) == [pytest.approx((1 + 4 + 9) / 6)] * 3


def test_explicit_weight_replaces_the_number_of_samples() -> None:
    def rank(g: Group) -> Any:
        ddp = DDP(Branches("a", a=scale(1.0)), g)
        return step(ddp, np.full((1, 1), g.rank * 1.0), np.ones((1, 1)), weight=[0.25, 0.75][g.rank])["a"]

    assert run_ranks(2, rank) == [pytest.approx(0.75)] * 2


def test_gradients_of_a_rank_of_weight_zero_are_ignored_even_if_nan() -> None:
    def rank(g: Group) -> Any:
        ddp = DDP(Branches("ab" if g.rank else "a", a=scale(1.0), b=scale(1.0)), g)
        value = float("nan") if g.rank else 3.0
        found = step(ddp, np.full((1, 1), value), np.ones((1, 1)), weight=0.0 if g.rank else 5.0)
        return found["a"], found["b"]

    # b is used by the padding only: as in one process, where there is no padding, nobody used it.
    assert run_ranks(2, rank) == [(3.0, None)] * 2


def test_a_micro_batch_of_weight_zero_is_ignored_even_if_nan() -> None:
    def rank(g: Group) -> Any:
        ddp = DDP(Branches("a", a=scale(1.0)), g)
        with ddp.no_sync():
            step(ddp, np.full((1, 1), 2.0), np.ones((1, 1)), weight=1)
            step(ddp, np.full((1, 1), np.nan), np.ones((1, 1)), weight=0)
        return step(ddp, np.full((1, 1), np.nan), np.ones((1, 1)), weight=0)["a"]

    assert run_ranks(2, rank) == [2.0] * 2


def test_a_total_weight_of_zero_raises_on_every_rank() -> None:
    def rank(g: Group) -> Any:
        ddp = DDP(Branches("a", a=scale(1.0)), g)
        with pytest.raises(StepOrderError, match="add up to 0"):
            step(ddp, np.ones((1, 1)), np.ones((1, 1)), weight=0)
        return step(ddp, np.ones((1, 1)), np.ones((1, 1)))["a"]

    assert run_ranks(2, rank) == [1.0] * 2
    assert run_ranks(1, rank) == [1.0]


@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
def test_unused_parameters_get_no_gradient_and_no_update(bucket_mb: float) -> None:
    """`a` by all, `b` by rank 0 only, `c` by nobody, and which of them changes from step to step."""

    def rank(g: Group) -> Any:
        module = Branches("", a=scale(1, 1), b=scale(1, 1), c=scale(1, 1))
        ddp = DDP(module, g, bucket_mb=bucket_mb)
        optimizer = SGD(ddp, lr=0.1, momentum=0.9, weight_decay=0.1)
        found = []
        for used in ("abc", "acb", "bca"):  # by all, by rank 0, by nobody
            module.use = used[:2] if g.rank == 0 else used[0]
            optimizer.zero_grad()
            grads = step(ddp, ONES, ONES)
            before = module.scales[used[2]].data.copy()
            optimizer.step()
            assert grads[used[2]] is None
            np.testing.assert_array_equal(module.scales[used[2]].data, before)  # no decay, no momentum
            found.append([grads[used[0]], grads[used[1]], {k: p.data.copy() for k, p in module.scales.items()}])
        return found

    first, second = run_ranks(2, rank)
    np.testing.assert_equal(first, second)
    np.testing.assert_array_equal(first[0][1], [0.5, 0.5])  # rank 1 sent zeros


def test_frozen_parameters_are_broadcast_but_not_reduced() -> None:
    def rank(g: Group) -> Any:
        module = Branches("ab", a=scale(2.0 + g.rank, requires_grad=False), b=scale(1.0))
        found = step(DDP(module, g), np.ones((1, 1)), np.ones((1, 1)))
        return module.scales["a"].data.tolist(), found["a"], found["b"].tolist()  # type: ignore[union-attr]

    assert run_ranks(2, rank) == [([2.0], None, [2.0])] * 2


def test_freezing_works_between_steps_but_is_refused_in_no_sync() -> None:
    def rank(g: Group) -> Any:
        module = Branches("ab", a=scale(2.0, requires_grad=False), b=scale(1.0))
        ddp = DDP(module, g)
        step(ddp, np.ones((1, 1)), np.ones((1, 1)))
        SGD(ddp, lr=0.1).zero_grad()
        module.scales["a"].requires_grad = True
        module.scales["b"].requires_grad = False
        found = step(ddp, np.full((1, 1), g.rank + 1.0), np.ones((1, 1)))
        with ddp.no_sync():
            step(ddp, np.ones((1, 1)), np.ones((1, 1)))
            module.scales["b"].requires_grad = True
            with pytest.raises(StepOrderError, match="frozen or unfrozen"):
                ddp(ONES)
        return found

    assert run_ranks(2, rank) == [{"a": 1.5, "b": None}] * 2


def test_gradients_from_before_a_freeze_are_kept() -> None:
    def rank(g: Group) -> Any:
        module = Branches("ab", a=scale(2.0), b=scale(1.0))
        ddp = DDP(module, g)
        x = np.full((1, 1), g.rank * 2.0)
        step(ddp, x, np.ones((1, 1)))
        module.scales["b"].requires_grad = False
        return step(ddp, x, np.ones((1, 1)))

    assert run_ranks(2, rank) == [{"a": 2.0, "b": 2.0}] * 2  # a twice 1; b stays at its last, which nobody will use


def test_tied_parameters_are_reduced_and_updated_once() -> None:
    def rank(g: Group) -> Any:
        shared = scale(3.0)
        module = Branches("ab", a=shared, b=shared)  # y = w * w * x
        ddp = DDP(module, g)
        optimizer = SGD(ddp, lr=0.5)
        for _ in range(3):  # the second and third send early
            optimizer.zero_grad()
            step(ddp, np.full((1, 1), g.rank * 2.0), np.ones((1, 1)))
        return gradient(shared), len(optimizer.state_dict()["state"])

    assert run_ranks(2, rank) == [(6.0, 1)] * 2


def test_a_layer_used_twice_gets_the_right_gradient() -> None:
    def rank(g: Group) -> Any:
        ddp = DDP(Branches("aba", a=scale(3.0), b=scale(5.0)), g, bucket_mb=1e-6)  # y = a * a * b * x
        optimizer = SGD(ddp, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            found = step(ddp, np.full((1, 1), g.rank * 2.0), np.ones((1, 1)))
            assert found == {"a": 30.0, "b": 9.0}
        return True

    assert all(run_ranks(2, rank))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("explicit", [False, True])
def test_accumulation_in_no_sync_equals_one_big_batch(dtype: str, explicit: bool) -> None:
    x, labels = samples(dtype)
    whole = mlp(0, dtype)
    whole.backward(nn.softmax_cross_entropy(whole.forward(x[:60]), labels[:60])[1])
    expected = {path: gradient(p) for path, p in whole.named_parameters()}

    def rank(g: Group) -> Any:
        ddp = DDP(mlp(0, dtype), g, bucket_mb=600 / 2**20)
        optimizer = SGD(ddp, lr=0.1)

        def micro_batch(start: int, stop: int) -> None:
            ddp.backward(nn.softmax_cross_entropy(ddp(x[start:stop]), labels[start:stop])[1])

        for _ in range(2):
            optimizer.zero_grad()
            bounds = [0, 1, 12, 20] if g.rank == 0 else [20, 35, 36, 60]  # uneven in ranks and in micro-batches
            with ddp.no_sync():
                micro_batch(bounds[0], bounds[1])
                micro_batch(bounds[1], bounds[2])
                if explicit:
                    micro_batch(bounds[2], bounds[3])
            if not explicit:
                micro_batch(bounds[2], bounds[3])
            ddp.sync_gradients()  # nothing is pending after the implicit form
        return {path: gradient(p) for path, p in ddp.named_parameters()}

    first, second = run_ranks(2, rank)
    for path, values in expected.items():
        np.testing.assert_array_equal(first[path], second[path])
        np.testing.assert_allclose(first[path], values, rtol=1e-4, atol=1e-6 if dtype == "float32" else 1e-14)


def test_backward_without_zero_grad_adds_to_earlier_gradients() -> None:
    def rank(g: Group) -> Any:
        module = Branches("a", a=scale(1.0), b=scale(1.0))
        ddp = DDP(module, g)
        x = np.full((1, 1), g.rank + 1.0)  # the mean is 1.5
        first = step(ddp, x, np.ones((1, 1)))["a"]
        second = step(ddp, x, np.ones((1, 1)))["a"]
        module.use = "b"
        third = step(ddp, x, np.ones((1, 1)))
        return first, second, third["a"], third["b"]

    assert run_ranks(2, rank) == [(1.5, 3.0, 3.0, 1.5)] * 2
    assert run_ranks(1, rank) == [(1.0, 2.0, 2.0, 1.0)]


def test_sync_gradients_averages_after_the_module_s_own_backward() -> None:
    def rank(g: Group) -> Any:
        module = Branches("a", a=scale(1.0))
        ddp = DDP(module, g)
        rows = g.rank + 1
        ddp(np.full((rows, 1), rows * 1.0))
        module.backward(np.full((rows, 1), 1 / rows))
        ddp.sync_gradients()
        weighted = gradient(module.scales["a"])
        ddp.sync_gradients()
        assert module.scales["a"].grad == weighted
        module.scales["a"].grad = None
        module.forward(np.full((1, 1), rows * 1.0))
        module.backward(np.ones((1, 1)))
        ddp.sync_gradients(weight=float(g.rank))
        return weighted, gradient(module.scales["a"])

    assert run_ranks(2, rank) == [(pytest.approx(5 / 3), 2.0)] * 2


def test_sync_gradients_works_without_a_forward_through_ddp() -> None:
    def rank(g: Group) -> Any:
        module = Branches("a", a=scale(1.0))
        module.forward(np.full((1, 1), g.rank * 1.0))
        module.backward(np.ones((1, 1)))
        DDP(module, g).sync_gradients()
        return module.scales["a"].grad

    assert run_ranks(4, rank) == [1.5] * 4


def test_mixed_dtypes_empty_and_scalar_parameters_are_reduced() -> None:
    def rank(g: Group) -> Any:
        module = Branches(
            "abcd", a=scale(1, dtype="f4"), b=scale(1, 1), c=Parameter(np.array(2.0)), d=scale(1, 1, dtype="f4")
        )
        ddp = DDP(Branches("", **module.scales, e=Parameter(np.zeros((0, 3)))), g)
        ddp(ONES)
        for p in ddp.module.named_parameters():
            p[1].accumulate(np.full(p[1].data.shape, g.rank * 4.0))
        ddp.sync_gradients()
        return [(path, p.grad.dtype.name, p.grad.tolist()) for path, p in ddp.named_parameters() if p.grad is not None]

    expected = [
        ("a", "float32", [2.0]),
        ("b", "float64", [2.0, 2.0]),
        ("c", "float64", 2.0),
        ("d", "float32", [2.0, 2.0]),
        ("e", "float64", []),
    ]
    assert run_ranks(2, rank) == [expected] * 2


def test_a_trained_float16_parameter_is_refused() -> None:
    def rank(g: Group) -> None:
        with pytest.raises(UnsupportedOp, match="'a' is float16"):
            DDP(Branches("", a=scale(1, dtype="f2")), g)(ONES)

    run_ranks(1, rank)


def test_gradient_addresses_stay_and_memory_does_not_grow() -> None:
    def rank(g: Group) -> Any:
        x, labels = samples()
        ddp = DDP(mlp(), g, bucket_mb=600 / 2**20)
        optimizer = SGD(ddp, lr=0.1, momentum=0.9)
        homes = []

        def steps(count: int) -> None:
            for _ in range(count):
                dy = nn.softmax_cross_entropy(ddp(x[:8]), labels[:8])[1]
                optimizer.zero_grad()
                ddp.backward(dy)
                optimizer.step()
                homes.append([p.grad.__array_interface__["data"][0] for _, p in ddp.named_parameters()])  # type: ignore[union-attr]
                homes[:-1] = homes[:1]

        for _ in range(1000):
            g.barrier()  # the flight recorder is full now
        steps(50)
        before = tracemalloc.get_traced_memory()[0]
        steps(100)
        return tracemalloc.get_traced_memory()[0] - before, homes[0] == homes[-1]

    tracemalloc.start()
    try:
        results = run_ranks(2, rank)
    finally:
        tracemalloc.stop()
    assert all(same for _, same in results)
    assert max(grown for grown, _ in results) < 100_000  # one set of gradients is 3.1 kB: kept, it would be 310 kB
