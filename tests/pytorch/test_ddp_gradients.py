"""Where gradients lie, how they add up, and which parameters have one."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytorch.models import assert_same_bits, built, gradients, mlp, samples, weights  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import paceline  # noqa: E402
import paceline.torch  # noqa: E402
from paceline.errors import PacelineError, StepOrderError, UnsupportedOp  # noqa: E402
from paceline.group import Group  # noqa: E402
from paceline.testing import local_groups, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

DDP = paceline.torch.DDP
cross_entropy = torch.nn.functional.cross_entropy
X, T = samples()


def loss_of(model: Any, rank: int = 0, batch: int = 0) -> Any:
    """The mean loss over 8 samples that belong to a rank and batch."""
    start = (rank * 8 + batch * 16) % 40
    return cross_entropy(model(X[start : start + 8]), T[start : start + 8])


def whole(*batches: int, world: int = 2) -> Any:
    """What one process has after backward passes over these batches, each the mean over all ranks' samples."""
    model = mlp()
    for batch in batches:
        (sum(loss_of(model, rank, batch) for rank in range(world)) / world).backward()
    return gradients(model)


def check(run: Any, expected: Any, world: int = 2) -> None:
    """All ranks end with the same gradients, the expected ones."""
    ranks = run_ranks(world, run)
    assert_same_bits(ranks)
    torch.testing.assert_close(ranks[0], expected)


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
        (bucket,) = model._passes._reducer._buckets
        begin = bucket.flat.ctypes.data
        assert all(begin <= place < begin + bucket.flat.nbytes for place in places[0])
        return gradients(model)

    check(run, whole(3))


def test_passes_add_up() -> None:
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
def test_what_no_sync_left_is_cleared(to_none: bool) -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        with model.no_sync():
            model.backward(loss_of(model, group.rank, 0), 5.0)
        model.zero_grad(set_to_none=to_none)
        loss_of(model, group.rank, 1).backward()
        return gradients(model)

    check(run, whole(1))


def test_sync_gradients_reduces_what_no_sync_left() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        with model.no_sync():
            loss_of(model, group.rank, 0).backward()
            loss_of(model, group.rank, 1).backward()
        model.sync_gradients()
        model.sync_gradients()
        return gradients(model)

    check(run, whole(0, 1))


def test_several_backward_passes_through_one_graph() -> None:
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


def test_gradients_that_do_not_accumulate_wake_nobody() -> None:
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


class Branches(torch.nn.Module):  # type: ignore[misc]
    """Three layers, of which a pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(5, 3, dtype=torch.float64) for name in "abc"})

    def forward(self, x: Any, use: str) -> Any:
        return sum(self.layers[name](x) for name in use)


@pytest.mark.parametrize("static", [False, True])
def test_parameters_that_are_not_used(static: bool) -> None:
    """One that only rank 0 uses gets its part everywhere; one that nobody uses keeps no gradient."""
    x, t = samples()

    def run(group: Group) -> Any:
        model = DDP(built(Branches), group, bucket_mb=1e-6, static_graph=static)
        for _ in range(3):
            model.zero_grad()
            cross_entropy(model(x, "ab" if group.rank == 0 else "a"), t).backward()
        return gradients(model)

    model = built(Branches)
    ((cross_entropy(model(x, "ab"), t) + cross_entropy(model(x, "a"), t)) / 2).backward()
    ranks = run_ranks(2, run)
    assert ranks[0]["layers.c.weight"] is None
    assert ranks[0]["layers.b.weight"] is not None
    for found in ranks:
        torch.testing.assert_close(found, gradients(model))


def test_unlike_graphs_from_pass_to_pass() -> None:
    x, t = samples()
    uses = [("a", "b"), ("abc", "c"), ("b", "bc"), ("c", "a")]

    def run(group: Group) -> Any:
        model = DDP(built(Branches), group, bucket_mb=1e-6)
        for use in uses:
            cross_entropy(model(x, use[group.rank]), t).backward()
        return gradients(model)

    model = built(Branches)
    for use in uses:
        (sum(cross_entropy(model(x, each), t) for each in use) / 2).backward()
    check(run, gradients(model))


def test_static_graph_that_changes() -> None:
    x, t = samples()
    model = DDP(Branches(), local_groups(1)[0], bucket_mb=1e-6, static_graph=True)
    cross_entropy(model(x, "a"), t).backward()
    with pytest.raises(StepOrderError, match="uses it more often"):
        cross_entropy(model(x, "ac"), t).backward()
    assert all(p.grad is None for p in model.parameters())
    cross_entropy(model(x, "a"), t).backward()
    assert model.module.layers["a"].weight.grad is not None


def test_loss_that_depends_on_no_parameter() -> None:
    def run(group: Group) -> Any:
        model = DDP(mlp(), group)
        loss = loss_of(model)
        model.backward(loss if group.rank == 0 else loss.detach(), 1.0)
        return gradients(model)

    model = mlp()
    (loss_of(model) / 2).backward()
    check(run, gradients(model))


class Tied(torch.nn.Module):  # type: ignore[misc]
    """A layer that is used twice, by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 5, dtype=torch.float64)
        self.second = self.first
        self.last = torch.nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.last(self.second(torch.tanh(self.first(x))))


class Checkpointed(torch.nn.Module):  # type: ignore[misc]
    """Recomputes its first half in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Any) -> Any:
        return self.inner[3](checkpoint(self.inner[:3], x, use_reentrant=False))


class Frozen(torch.nn.Module):  # type: ignore[misc]
    """Its first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.inner[0].requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("make", [Tied, Checkpointed, Frozen])
def test_modules_of_many_kinds(make: Any) -> None:
    def run(group: Group) -> Any:
        model = DDP(built(make), group, bucket_mb=300 / 2**20)
        for batch in range(3):
            loss_of(model, group.rank, batch).backward()
        return gradients(model)

    alone = built(make)
    for batch in range(3):
        ((loss_of(alone, 0, batch) + loss_of(alone, 1, batch)) / 2).backward()
    check(run, gradients(alone))


def test_reentrant_checkpoints_are_refused() -> None:
    model = DDP(mlp(), local_groups(1)[0])
    model.prepare()
    x = X.clone().requires_grad_()
    y = model.module[3](checkpoint(model.module[:3], x, use_reentrant=True))
    with pytest.raises(StepOrderError, match="use_reentrant=True"):
        y.sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_another_thread_is_told_that_it_may_not() -> None:
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

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return raised

    for raised in run_ranks(2, run):
        assert len(raised) == 1
    assert isinstance(raised[0], PacelineError)


def test_unfreezing() -> None:
    def run(group: Group) -> Any:
        module = mlp()
        module[0].requires_grad_(False)
        model = DDP(module, group)
        loss_of(model, group.rank, 0).backward()
        assert module[0].weight.grad is None
        module[0].requires_grad_(True)
        model.zero_grad()
        loss_of(model, group.rank, 1).backward()
        return gradients(model)

    check(run, whole(1))


def test_channels_last_and_sparse_gradients() -> None:
    class Odd(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(6, 4, sparse=True)
            self.conv = torch.nn.Conv2d(4, 2, 2).to(memory_format=torch.channels_last)

        def forward(self, x: Any) -> Any:
            return self.conv(self.words(x).permute(0, 3, 1, 2)).square().mean()

    inputs = torch.arange(2 * 2 * 9).reshape(2, 2, 3, 3) % 6

    def run(group: Group) -> Any:
        model = DDP(built(Odd), group)
        for _ in range(2):
            model(inputs[group.rank]).backward()
        return gradients(model)

    alone = built(Odd)
    for _ in range(2):
        ((alone(inputs[0]) + alone(inputs[1])) / 2).backward()
    check(run, {path: g.to_dense() for path, g in gradients(alone).items()})


def test_buffers_are_rank_0s() -> None:
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


def test_clipping() -> None:
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


def test_paths_are_those_of_the_bare_module() -> None:
    module = mlp()
    model = DDP(module, local_groups(1)[0])
    assert [path for path, _ in model.named_parameters()] == [path for path, _ in module.named_parameters()]
    assert model.state_dict().keys() == module.state_dict().keys()
    model.load_state_dict(mlp(7).state_dict())
    assert_same_bits([weights(module), weights(mlp(7))])
    assert list(model.parameters()) == list(module.parameters())


def test_what_cannot_be_trained() -> None:
    group = local_groups(1)[0]
    with pytest.raises(UnsupportedOp, match="complex64; only float16, bfloat16"):
        DDP(torch.nn.Linear(2, 2, dtype=torch.complex64), group)(torch.ones(1, 2, dtype=torch.complex64))
    with pytest.raises(UnsupportedOp, match="on the CPU"):
        DDP(torch.nn.Linear(2, 2, device="meta"), group).prepare()
    with pytest.raises(ValueError, match="bucket_mb"):
        DDP(mlp(), group, bucket_mb=0)


def test_backward_pass_that_raises() -> None:
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


def test_a_stale_pass_is_not_gone_on_with() -> None:
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
    with pytest.raises(StepOrderError, match="before the last one was through"):
        second.backward(retain_graph=True)
    second.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_module_wrapped_again() -> None:
    """The new wrapper has it; the old one hears nothing any more."""

    def run(group: Group) -> Any:
        module = mlp()
        for _ in range(3):
            model = DDP(module, group)
            model.zero_grad()
            before = group.progress().operation
            model.prepare()
            agreed = group.progress().operation
            loss_of(model, group.rank).backward()
            assert group.progress().operation == agreed + 1 > before
        return gradients(model)

    check(run, whole(0))


def test_nothing_stays_of_a_wrapper_that_is_gone() -> None:
    group = local_groups(1)[0]
    module = mlp()
    model = DDP(module, group)
    loss_of(model).backward()
    ends = [weakref.ref(each) for each in (model, model._passes, module[0].weight, module)]
    del model
    gc.collect()
    assert [end() is None for end in ends] == [True, True, False, False]
    module.zero_grad()
    loss_of(module).backward()
    torch.testing.assert_close(gradients(module), whole(0, world=1), rtol=0, atol=0)
    del module
    gc.collect()
    assert all(end() is None for end in ends)
