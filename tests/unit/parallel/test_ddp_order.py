"""The order of things: overlap, the fixed order of buckets, and what an error leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Array, Branches, RecordingGroup, scale

from paceline._group import Group
from paceline._parallel import DDP
from paceline.errors import PeerLost, SizeMismatch, StepOrderError
from paceline.testing import run_ranks

X = np.ones((1, 3))
TINY = 1e-6
"""Every parameter has a bucket of its own."""


def clear(ddp: DDP) -> None:
    for _, parameter in ddp.named_parameters():
        parameter.grad = None


def recorded(use: str = "abc", bucket_mb: float = TINY, **settings: Any) -> tuple[DDP, Branches, RecordingGroup]:
    """A model of parameters of 1, 1 and 3 elements whose backward writes to the group's log."""
    group = RecordingGroup()
    module = Branches(use, a=scale(1), b=scale(1), c=scale(1, 1, 1))
    module.before_backward_of = lambda name: group.log.append(f"backward {name}")
    return DDP(module, group, bucket_mb=bucket_mb, **settings), module, group


def test_construction_communicates_nothing() -> None:
    class Silent(RecordingGroup):
        def all_reduce(self, *args: Any, **settings: Any) -> Any:
            raise AssertionError("communication")

        broadcast = all_reduce

    DDP(Branches("a", a=scale(1)), Silent())


def test_a_piggyback_is_summed_in_the_first_bucket_of_a_pass() -> None:
    ddp, _, group = recorded()
    arrived: list[list[float]] = []

    class Rider:
        values = np.array([1.0, 15.0])

        def arrive(self, sums: Array) -> None:
            arrived.append(sums.tolist())

    waiting: list[Rider] = [Rider()]
    group._core.take_piggyback = lambda: waiting.pop() if waiting else None  # type: ignore[assignment, return-value]
    for _ in range(2):
        ddp(X)
        ddp.backward(X)
    assert arrived == [[2.0, 30.0]]


def test_later_passes_overlap_backward_with_sending() -> None:
    ddp, _, group = recorded()
    for _ in range(2):
        clear(ddp)
        ddp(X)
        ddp.backward(X)
    # A message holds the gradients, the weight and the flags: 3 + 1 + 1 elements for c, 1 + 1 + 1 for the others.
    assert group.log == [
        *["backward c", "backward b", "backward a", "send 31", "send 3", "reduce 3"],
        *["backward c", "send 31", "backward b", "send 3", "backward a", "send 3"],
    ]


def test_a_single_small_bucket_is_reduced_at_the_end_in_the_caller() -> None:
    ddp, _, group = recorded(bucket_mb=25)
    for _ in range(2):
        clear(ddp)
        ddp(X)
        ddp.backward(X)
    assert group.log == ["backward c", "backward b", "backward a", "reduce 35"] * 2


def test_buckets_are_sent_in_order_for_any_order_of_gradients() -> None:
    ddp, module, group = recorded()
    ddp(X)
    ddp.backward(X)
    clear(ddp)
    group.log.clear()
    module.use = "cba"  # backward runs a, b, c; buckets are c, b, a
    ddp(X)
    ddp.backward(X)
    assert group.log == ["backward a", "backward b", "backward c", "send 31", "send 3", "send 3"]


def test_an_unused_parameter_delays_later_buckets_until_the_end() -> None:
    ddp, module, group = recorded()
    for use in ("abc", "ac"):
        clear(ddp)
        module.use = use
        group.log.clear()
        ddp(X)
        ddp.backward(X)
    assert group.log == ["backward c", "send 31", "backward a", "send 3", "reduce 3"]


def test_static_graph_does_not_wait_for_an_unused_parameter() -> None:
    ddp, module, group = recorded(static_graph=True)
    for _ in range(2):
        clear(ddp)
        module.use = "ac"
        group.log.clear()
        ddp(X)
        ddp.backward(X)
    assert group.log == ["backward c", "send 31", "send 3", "backward a", "send 3"]
    clear(ddp)
    module.use = "abc"
    ddp(X)
    with pytest.raises(StepOrderError, match=r"'b'.*uses the parameter more often than any before"):
        ddp.backward(X)


def test_no_sync_sends_nothing() -> None:
    ddp, _, group = recorded()
    with ddp.no_sync():
        for _ in range(3):
            ddp(X)
            ddp.backward(X)
    assert not [line for line in group.log if line.startswith(("send", "reduce"))]
    ddp.sync_gradients()
    assert group.log[-3:] == ["send 31", "send 3", "reduce 3"]
    group.log.clear()
    ddp.sync_gradients()
    assert group.log == []


def test_a_gradient_after_its_bucket_was_sent_is_refused_once() -> None:
    ddp, module, _ = recorded()
    for use, right in [("abc", True), ("acbc", False), ("acbc", True), ("abc", True)]:
        clear(ddp)
        module.use = use
        ddp(X)
        if right:
            ddp.backward(X)
            assert all(p.grad is not None for p in module.scales.values())
        else:
            with pytest.raises(StepOrderError, match="'c' got another gradient after its bucket was sent"):
                ddp.backward(X)
            assert all(p.grad is None for p in module.scales.values())
    np.testing.assert_array_equal(module.scales["c"].grad, [1, 1, 1])


def test_a_gradient_being_reduced_is_read_only() -> None:
    ddp, module, _ = recorded()
    ddp(X)
    ddp.backward(X)
    clear(ddp)

    def meddle(name: str) -> None:
        if name == "b":  # c has been sent
            module.scales["c"].grad += 1  # type: ignore[operator]

    module.before_backward_of = meddle
    ddp(X)
    with pytest.raises(ValueError, match="read-only"):
        ddp.backward(X)
    module.before_backward_of = lambda name: None
    ddp(X)
    ddp.backward(X)
    module.scales["c"].grad *= 0.5  # type: ignore[operator]  # after the reduction it is the user's again


@pytest.mark.parametrize("when", ["a", "b", "c"])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_after_an_exception_in_backward_is_right(when: str, early: bool) -> None:
    """Every rank fails at the same place, after some buckets have gone, and tries again."""

    def rank(g: Group) -> Any:
        module = Branches("abc", a=scale(1.0), b=scale(2.0), c=scale(3.0))
        ddp = DDP(module, g, bucket_mb=TINY)
        x = np.full((1, 1), g.rank * 2.0)
        if early:
            ddp(x)
            ddp.backward(np.ones((1, 1)))
            clear(ddp)

        def fail(name: str) -> None:
            if name == when:
                raise ZeroDivisionError("as ordered")

        module.before_backward_of = fail
        ddp(x)
        with pytest.raises(ZeroDivisionError):
            ddp.backward(np.full((1, 1), 1e6))
        assert all(p.grad is None for p in module.scales.values())
        module.before_backward_of = lambda name: None
        found = []
        for _ in range(2):
            clear(ddp)
            ddp(x)
            ddp.backward(np.ones((1, 1)))
            found.append({path: float(p.grad[0]) for path, p in module.scales.items() if p.grad is not None})
        return found

    assert run_ranks(2, rank) == [[{"a": 6.0, "b": 3.0, "c": 2.0}] * 2] * 2


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_step_after_a_failed_collective_is_right(fail_at: int) -> None:
    ddp, module, group = recorded()
    group.fail_at = fail_at
    with ddp.no_sync():
        ddp(X)
        ddp.backward(X)
    ddp(X)
    with pytest.raises(ConnectionError):
        ddp.backward(X)
    assert all(p.grad is None for p in module.scales.values())
    ddp(X)
    ddp.backward(X)
    np.testing.assert_array_equal(module.scales["c"].grad, [1, 1, 1])


def test_clearing_gradients_drops_accumulated_weights() -> None:
    ddp, module, _ = recorded()
    with ddp.no_sync():
        ddp(X)
        ddp.backward(X, weight=7)
    clear(ddp)
    ddp(X)
    ddp.backward(X, weight=1)
    np.testing.assert_array_equal(module.scales["c"].grad, [1, 1, 1])


def test_clearing_some_gradients_in_an_accumulation_is_refused() -> None:
    ddp, module, _ = recorded()
    with ddp.no_sync():
        ddp(X)
        ddp.backward(X)
    module.scales["a"].grad = None
    with pytest.raises(StepOrderError, match="'a' was cleared in the middle"):
        ddp.backward(X)
    with pytest.raises(StepOrderError, match="'a' was cleared in the middle"):
        ddp.sync_gradients()


def test_gradients_written_outside_backward_are_refused() -> None:
    ddp, module, _ = recorded()
    ddp(X)
    module.backward(X)
    with pytest.raises(StepOrderError, match="written outside"):
        ddp.backward(X)
    clear(ddp)
    with ddp.no_sync():
        ddp(X)
        ddp.backward(X)
    module.backward(X)
    with pytest.raises(StepOrderError, match="in an accumulation"):
        ddp.sync_gradients()


def test_gradients_cleared_with_zeros_are_accepted() -> None:
    ddp, module, _ = recorded()
    for _ in range(2):
        for parameter in module.scales.values():
            parameter.grad = np.zeros_like(parameter.data)
        ddp(X)
        ddp.backward(X)
    np.testing.assert_array_equal(module.scales["c"].grad, [1, 1, 1])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_negative_or_non_finite_weight_raises_value_error(weight: float) -> None:
    ddp, _, _ = recorded()
    ddp(X)
    with pytest.raises(ValueError, match="weight"):
        ddp.backward(X, weight)


def test_scalar_gradient_without_a_weight_raises_size_mismatch() -> None:
    ddp, _, _ = recorded()
    ddp(X)
    with pytest.raises(SizeMismatch, match="pass weight="):
        ddp.backward(np.array(1.0))


def test_nested_wrappers_of_one_module_are_refused() -> None:
    group = RecordingGroup()
    outer = DDP(DDP(Branches("a", a=scale(1)), group), group)
    outer(np.ones((1, 1)))
    with pytest.raises(StepOrderError, match="wrapped twice"):
        outer.backward(np.ones((1, 1)))


def test_two_wrappers_of_one_module_can_take_turns() -> None:
    def rank(g: Group) -> Array:
        module = Branches("a", a=scale(1.0))
        first, second = DDP(module, g), DDP(module, g)
        for ddp in (first, second, first):
            clear(ddp)
            ddp(np.full((1, 1), g.rank * 2.0))
            ddp.backward(np.ones((1, 1)))
            assert module.scales["a"].grad == 1.0
        return module.scales["a"].data

    run_ranks(2, rank)


def test_one_rank_can_retry_backward_before_its_first_send() -> None:
    """The rank tries again by itself; the others, who wait for it, notice nothing."""

    def rank(g: Group) -> Any:
        module = Branches("ab", a=scale(1.0), b=scale(1.0))
        ddp = DDP(module, g, bucket_mb=TINY)
        ddp(np.full((1, 1), g.rank * 2.0))

        def fail(name: str) -> None:
            raise ZeroDivisionError("as ordered")

        if g.rank == 1:
            module.before_backward_of = fail
            with pytest.raises(ZeroDivisionError):
                ddp.backward(np.ones((1, 1)))
            module.before_backward_of = lambda name: None
        ddp.backward(np.ones((1, 1)))
        return module.scales["a"].grad

    assert run_ranks(2, rank) == [1.0] * 2


def test_a_rank_that_leaves_raises_peer_lost_on_the_others() -> None:
    def rank(g: Group) -> Any:
        module = Branches("a", a=scale(1.0))
        ddp = DDP(module, g)
        ddp(np.ones((1, 1)))
        if g.rank == 0:
            return None
        with pytest.raises(PeerLost):
            ddp.backward(np.ones((1, 1)))
        return module.scales["a"].grad

    assert run_ranks(2, rank) == [None, None]
