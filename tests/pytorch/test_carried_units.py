"""FSDP on a device whose gathers and scatters an engine carries: what it copies, refuses and survives.

The device is a fake (`fake_device`), and the engine is Gloo. That it trains as one process: `test_fsdp_training`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytorch.fake_device import LateStreams, install
from pytorch.torch_models import assert_same_gradients, data, loss_of, made, net, rows_of, wrap
from torch import nn
from unit.engines.fake_engine import connected_engine

from paceline._base.sum_order import EVEN
from paceline._group import Group
from paceline.config import Config
from paceline.errors import PeerLost, UnsupportedOp
from paceline.testing import local_groups, next_generation, run_groups, run_ranks
from paceline.torch import FSDP
from paceline.torch._engine_flat_transport import EngineFlatTransport
from paceline.torch._gloo_engine import GlooEngine
from paceline.torch._pinned import PinnedMemory, pinned_memory
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.microbatches import microbatches

pytestmark = pytest.mark.needs(what="torch")

GLOO = Config(engine="gloo", failure_timeout=20.0)  # Gloo itself gives up a sum after so long


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    install(monkeypatch.setattr)
    return monkeypatch


class Trained:
    """A model that one rank trains; each block, and the rest, is a unit."""

    def __init__(self, group: Group, name: str = "full") -> None:
        self.group = group
        self.model = wrap(net(), group, name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        x, t = data(22)
        rows = rows_of(self.group.rank, self.group.size, 22)
        self.optimizer.zero_grad()
        loss_of(self.model(x[rows]), t[rows]).backward()
        self.optimizer.step()

    @property
    def bits(self) -> list[bytes]:
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]


@pytest.mark.parametrize("mixed_precision", [None, "bf16"])
def test_each_rank_copies_only_its_shards(mixed_precision: str | None, device: pytest.MonkeyPatch) -> None:
    lend, lent = PinnedMemory.lend, dict[int, list[tuple[int, Any]]]()

    def counted(memory: PinnedMemory, count: int, dtype: Any, *others: Any) -> Any:
        lent.setdefault(id(memory), []).append((count, dtype))
        return lend(memory, count, dtype, *others)

    device.setattr(PinnedMemory, "lend", counted)

    def rank(group: Group) -> tuple[int, list[tuple[int, Any]]]:
        model = wrap(net(0, torch.float32), group, "full", "one", mixed_precision=mixed_precision)
        x, t = data(6, torch.float32)
        loss_of(model(x), t).backward()
        return sum(p.numel() for p in model.parameters()), lent[id(pinned_memory(group))]

    found = run_ranks(3, rank, config=GLOO)
    shard = -(-sum(elements for elements, _ in found) // 3)
    there = torch.float32 if mixed_precision is None else torch.bfloat16
    for _, loans in found:  # Gloo does not sum bfloat16
        assert loans == [(shard, there), (shard, there), (shard, torch.float32)], "forward, backward, gradients"


@pytest.mark.parametrize("name", ["full", "grad", "hybrid2"])
@pytest.mark.parametrize("when", ["before a gather", "before a scatter", "after a scatter"])
def test_a_verdict_ends_the_step_and_the_next_generation_has_the_same_bits(
    when: str, name: str, device: pytest.MonkeyPatch
) -> None:
    """The verdict reaches all ranks after two gathers, or two scatters, have begun."""
    both = threading.Barrier(4)

    def fail(group: Group) -> None:
        both.wait(20)  # else a rank would lose another one, and wait for a verdict
        group._core.mesh.fault.settle(Verdict(1, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost"))

    def failing(what: str) -> Callable[..., Any]:
        act, calls = getattr(EngineFlatTransport, what), dict[int, int]()

        def changed(transport: EngineFlatTransport, *args: Any) -> Any:
            me = threading.get_ident()
            calls[me] = calls.get(me, 0) + 1
            if when.startswith("before") and calls[me] == 3:
                fail(transport._ranks)
            found = act(transport, *args)
            if when.startswith("after") and calls[me] == 2:
                found.wait()
                fail(transport._ranks)
            return found

        return changed

    def struck(trained: Trained) -> None:
        with pytest.raises(PeerLost):
            trained.step()
        assert all(p.grad is None for p in trained.model.parameters())
        trained.model.drop_gradients()
        held = [path for path, p in trained.model.module.named_parameters() if p.numel() and not p.isnan().all()]
        assert name == "grad" or not held, "whole parameters were kept"

    groups = local_groups(4, GLOO)
    with ThreadPoolExecutor(4) as pool:
        ranks = list(pool.map(lambda group: Trained(group, name), groups))
        list(pool.map(Trained.step, ranks))
        for group in groups:
            group.hand_over()
        what = when.split()[-1]
        with device.context() as late:
            late.setattr(EngineFlatTransport, what, failing(what))
            list(pool.map(struck, ranks))
    for group in groups:
        group.hand_over()
    next_generation(groups)
    assert not any(pinned_memory(group).lent for group in groups)
    run_groups(groups, lambda group: ranks[group.rank].step())

    def undisturbed(group: Group) -> list[bytes]:
        trained = Trained(group, name)
        trained.step()
        trained.step()
        return trained.bits

    assert [each.bits for each in ranks] == run_ranks(4, undisturbed, config=GLOO)


class Hidden:
    """An output in which no tensor is found."""

    def __init__(self, of: Any) -> None:
        self.of = of


class Shift(nn.Module):
    """Adds a parameter, which autograd does not save, and multiplies by another, the second of its unit."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(0.1, 0.7, 7))
        self.scale = nn.Parameter(torch.linspace(1.0, 2.0, 7))
        self.hides = hides

    def forward(self, x: Any) -> Any:
        return Hidden(x + self.shift) if self.hides else x * self.scale + self.shift


class Around(nn.Module):
    """A layer, a `Shift`, and another layer."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(5, 7), Shift(hides), nn.Linear(7, 2)

    def forward(self, x: Any) -> Any:
        y = self.inner(self.enter(x))
        return self.leave(torch.tanh(y.of if isinstance(y, Hidden) else y))


@pytest.mark.parametrize("hides", [False, True], ids=["", "its output is not seen"])
@pytest.mark.parametrize("whole", [False, True], ids=["", "forward inside unshard"])
def test_gradients_are_those_of_one_process(hides: bool, whole: bool) -> None:
    """Autograd saves views of parameters before it runs backward, and may write a gradient before its unit begins."""
    x, t = data(6)

    def rank(group: Group) -> Any:
        model = FSDP(made(lambda: Around(hides).double()), group, auto_wrap=Shift)
        model.prepare()
        with model.unshard() if whole else nullcontext():
            loss = loss_of(model(x), t)
        loss.backward()
        return model.sharded.padded_gradients()

    alone = made(lambda: Around(hides).double())
    loss_of(alone(x), t).backward()
    assert_same_gradients(run_ranks(2, rank, config=GLOO), "full", alone)


def test_values_begin_where_kernels_want_them() -> None:
    def rank(group: Group) -> None:
        odd: list[int] = []
        block = nn.Linear(3, 3)
        block.register_forward_pre_hook(
            lambda module, inputs: odd.extend(p.data_ptr() % 16 for p in module.parameters())
        )
        model = FSDP(nn.Sequential(nn.Linear(1, 3), block), group)
        model(torch.ones(2, 1)).sum().backward()
        assert odd == [0, 0]

    run_ranks(2, rank, config=GLOO)


def test_microbatches_are_refused() -> None:
    def rank(group: Group) -> None:
        connected_engine(group)
        trained = Trained(group)
        trained.model.prepare()
        try:
            for _ in microbatches(group, 2):
                with pytest.raises(UnsupportedOp, match="one fixed order, which neither compression nor an engine"):
                    trained.step()
                break
        finally:
            group._core.set_order(EVEN)

    run_ranks(2, rank, config=GLOO)


@pytest.mark.parametrize("backward", [False, True])
def test_a_pass_in_a_cuda_graph_is_refused(backward: bool, device: pytest.MonkeyPatch) -> None:
    def rank(group: Group) -> None:
        trained = Trained(group)
        x, t = data(4)
        loss = loss_of(trained.model(x), t)
        group.barrier()
        device.setattr(LateStreams, "captures", lambda streams: True)
        group.barrier()
        with pytest.raises(UnsupportedOp, match="a CUDA graph captures this pass"):
            loss.backward() if backward else trained.model(x)
        group.barrier()
        device.setattr(LateStreams, "captures", lambda streams: False)
        group.barrier()
        trained.step()

    run_ranks(2, rank, config=GLOO)


def test_an_engine_without_gathers_is_refused(device: pytest.MonkeyPatch) -> None:
    device.setattr(GlooEngine, "traits", replace(GlooEngine.traits, shards=False))
    with pytest.raises(UnsupportedOp, match="the engine 'gloo' has no all_gather and reduce_scatter"):
        run_ranks(2, one_step, config=GLOO)


def test_an_engine_for_another_device_is_refused(device: pytest.MonkeyPatch) -> None:
    device.setattr(GlooEngine, "traits", replace(GlooEngine.traits, devices=frozenset({"cuda"})))
    with pytest.raises(UnsupportedOp, match="the engine 'gloo' sums on cuda, and the gradients are on cpu"):
        run_ranks(2, one_step, config=GLOO)


def one_step(group: Group) -> None:
    connected_engine(group)
    Trained(group).step()
