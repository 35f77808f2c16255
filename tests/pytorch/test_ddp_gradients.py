"""Where gradients lie, how they add up, and what an error leaves of them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from pytorch.models import T, X, assert_same_bits, check, gradients, loss_of, mlp, weights, whole

import paceline
import paceline.torch
from paceline._group import Group
from paceline.errors import ConcurrentUse, PacelineError, StepOrderError, UnsupportedOp
from paceline.testing import local_groups, run_ranks

pytestmark = pytest.mark.needs(what="torch")

DDP = paceline.torch.DDP
cross_entropy = torch.nn.functional.cross_entropy


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_stay_in_their_buckets(to_none: bool) -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(group.rank), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        places = []
        for batch in range(4):
            loss = loss_of(model, group.rank, batch)
            optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            places.append([p.grad.data_ptr() for p in model.parameters()])
            optimizer.step()
        assert places[0] == places[1] == places[2] == places[3]
        (bucket,) = model._driver.model.reducer.buckets
        begin = bucket.flat.ctypes.data
        assert all(begin <= place < begin + bucket.flat.nbytes for place in places[0])
        return gradients(model)

    check(run, whole(3))


def test_gradients_accumulate_over_backward_passes() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        for batch in range(3):
            loss_of(model, group.rank, batch).backward()
        return gradients(model)

    check(run, whole(0, 1, 2))


def test_no_sync_accumulates_and_sends_nothing() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        model.prepare()
        sent = group.bytes_sent
        with model.no_sync():
            loss_of(model, group.rank, 0).backward()
            loss_of(model, group.rank, 1).backward()
        assert group.bytes_sent == sent
        loss_of(model, group.rank, 2).backward()
        return gradients(model)

    check(run, whole(0, 1, 2))


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_clears_gradients_of_no_sync(to_none: bool) -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        with model.no_sync():
            model.backward(loss_of(model, group.rank, 0), 5.0)
        model.zero_grad(set_to_none=to_none)
        loss_of(model, group.rank, 1).backward()
        return gradients(model)

    check(run, whole(1))


def test_sync_gradients_reduces_gradients_of_no_sync() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        with model.no_sync():
            loss_of(model, group.rank, 0).backward()
            loss_of(model, group.rank, 1).backward()
        model.sync_gradients()
        model.sync_gradients()
        return gradients(model)

    check(run, whole(0, 1))


def test_two_backward_passes_through_one_graph() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        loss = loss_of(model, group.rank)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    check(run, whole(0, 0))


def test_two_forward_passes_then_two_backward_passes() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        losses = [loss_of(model, group.rank, batch) for batch in range(2)]
        for loss in losses:
            loss.backward()
        return gradients(model)

    check(run, whole(0, 1))


def test_autograd_grad_sends_nothing() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        model.prepare()
        sent = group.bytes_sent
        found = torch.autograd.grad(loss_of(model), list(model.parameters()))
        assert group.bytes_sent == sent
        assert all(p.grad is None for p in model.parameters())
        with torch.no_grad():
            model(X)
        return dict(enumerate(found))

    assert_same_bits(run_ranks(2, run))


def test_backward_in_another_thread_raises_concurrent_use() -> None:
    both_are_there = threading.Barrier(2)  # else the generation ends while the other rank is in its first pass

    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        loss_of(model, group.rank).backward()
        loss = loss_of(model, group.rank)
        raised: list[BaseException] = []

        def other() -> None:
            try:
                loss.backward()
            except PacelineError as error:
                raised.append(error)

        both_are_there.wait(10)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        (error,) = raised
        return type(error)

    assert ConcurrentUse in run_ranks(2, run)


def test_buffers_of_rank_0_are_broadcast() -> None:
    def run(group: Group) -> Any:
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)).double()
        model = DDP(module, group)
        for batch in range(2):
            loss_of(model, group.rank, batch).backward()
        return weights(model) | gradients(model)

    ranks = run_ranks(3, run)
    assert_same_bits(ranks)
    norm = torch.nn.BatchNorm1d(5).double()
    for batch in range(2):
        norm(X[batch * 16 : batch * 16 + 8])
    assert ranks[0]["0.num_batches_tracked"] == 2
    torch.testing.assert_close(ranks[0]["0.running_mean"], norm.running_mean)


def test_clip_grad_norm_matches_torch() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        loss_of(model, group.rank).backward()
        norm = model.clip_grad_norm(0.05)
        return {"norm": torch.tensor(norm), **gradients(model)}

    model = mlp()
    ((loss_of(model, 0) + loss_of(model, 1)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    ranks = run_ranks(2, run)
    assert_same_bits(ranks)
    torch.testing.assert_close(ranks[0].pop("norm").item(), norm.item())
    torch.testing.assert_close(ranks[0], gradients(model), rtol=1e-4, atol=1e-6)


def test_parameter_paths_match_the_bare_module() -> None:
    module = mlp()
    model = DDP(module, local_groups(1)[0])
    assert [path for path, _ in model.named_parameters()] == [path for path, _ in module.named_parameters()]
    assert model.state_dict().keys() == module.state_dict().keys()
    model.load_state_dict(mlp(7).state_dict())
    assert_same_bits([weights(module), weights(mlp(7))])
    assert list(model.parameters()) == list(module.parameters())


def test_unsupported_dtypes_devices_and_bucket_sizes_are_refused() -> None:
    group = local_groups(1)[0]
    with pytest.raises(UnsupportedOp, match="complex64; only float16, bfloat16"):
        DDP(torch.nn.Linear(2, 2, dtype=torch.complex64), group)(torch.ones(1, 2, dtype=torch.complex64))
    with pytest.raises(UnsupportedOp, match="does not train on meta"):
        DDP(torch.nn.Linear(2, 2, device="meta"), group).prepare()
    with pytest.raises(ValueError, match="bucket_mb"):
        DDP(mlp(), group, bucket_mb=0)


def test_training_recovers_after_a_backward_pass_raises() -> None:
    """Of the user's own function: gradients are dropped at the next forward pass, and all begin anew."""

    class Raises(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            raise ValueError("mine")

    model = DDP(mlp(), local_groups(1)[0])
    model.prepare()
    inner = model.module
    for backward in (lambda loss: loss.backward(), model.backward):
        y = inner[3](Raises.apply(inner[:3](X)))
        with pytest.raises(ValueError, match="mine"):
            backward(cross_entropy(y, T))
        cross_entropy(model(X), T).backward()
        alone = mlp()
        cross_entropy(alone(X), T).backward()
        torch.testing.assert_close(gradients(model), gradients(alone), rtol=0, atol=0)
        model.zero_grad()


def test_a_backward_pass_after_a_failed_one_is_refused_once() -> None:
    class Raises(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            raise ValueError("mine")

    model = DDP(mlp(), local_groups(1)[0])
    second = cross_entropy(model(X), T)
    with pytest.raises(ValueError, match="mine"):
        cross_entropy(model.module[3](Raises.apply(model.module[:3](X))), T).backward()
    with pytest.raises(StepOrderError, match="before the last one was finished"):
        second.backward(retain_graph=True)
    second.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_wrapping_a_module_again_detaches_the_old_wrapper() -> None:
    """The new wrapper has it; the old one hears nothing any more."""

    def run(group: Group) -> Any:
        module = mlp()
        for _ in range(3):
            model = DDP(module, group)
            model.zero_grad()
            before = group._core.progress().operation
            model.prepare()
            agreed = group._core.progress().operation
            loss_of(model, group.rank).backward()
            assert group._core.progress().operation == agreed + 1 > before
        return gradients(model)

    check(run, whole(0))


def test_a_deleted_wrapper_is_collected_and_leaves_no_hooks() -> None:
    group = local_groups(1)[0]
    module = mlp()
    model = DDP(module, group)
    loss_of(model).backward()
    ends = [weakref.ref(each) for each in (model, model._driver, module[0].weight, module)]
    del model
    gc.collect()
    assert [end() is None for end in ends] == [True, True, False, False]
    module.zero_grad()
    loss_of(module).backward()
    torch.testing.assert_close(gradients(module), whole(0, world=1), rtol=0, atol=0)
    del module
    gc.collect()
    assert all(end() is None for end in ends)
