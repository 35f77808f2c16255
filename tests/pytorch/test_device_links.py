"""Gradients of a model on a device travel over links, with the bits of a model on the CPU.

The device is a fake (`fake_device`): what is copied too late, or read too early, is seen in the bits.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline.config import Config
from paceline.errors import PacelineError, PeerLost, UnsupportedOp
from paceline.testing import local_groups, next_generation, run_groups, run_ranks
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from pytorch.fake_device import LateMark, LateStreams, install
from pytorch.test_microbatches_torch import train as train_in_microbatches

from paceline.torch import _device_streams, _pinned
from paceline.torch._device_streams import Mark
from paceline.torch._low_rank_tensors import LowRankTensorBucket
from paceline.torch._tensor_transports import DeviceTransport
from paceline.torch.ddp import DDP
from paceline.torch.fsdp import FSDP

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]

_seeding = threading.Lock()
"""Ranks are threads, which share torch's generator."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    install(monkeypatch.setattr)
    return monkeypatch


def net(dtype: Any = torch.float32) -> Any:
    with _seeding:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(20, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def digest(tensors: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for value in tensors:
        found.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(group: Any, *, steps: int = 4, dtype: Any = torch.float32, **settings: Any) -> str:
    """Trains for some steps on batches of different sizes, and accumulates once; returns a digest of the model."""
    model = DDP(net(dtype), group, bucket_mb=1e-3, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rng = np.random.default_rng([step, group.rank])
        optimizer.zero_grad()
        for synced in (False, True) if step == 2 else (True,):
            x = torch.from_numpy(rng.standard_normal((4 + group.rank, 20))).to(dtype)
            if synced:
                model.backward(model(x).square().mean(), weight=4 + group.rank)
            else:
                with model.no_sync():
                    model(x).square().mean().backward()
        optimizer.step()
    return digest(model.state_dict().values())


@pytest.mark.parametrize(
    ("dtype", "compression"),
    [
        *((dtype, None) for dtype in ("float32", "float64", "float16", "bfloat16")),
        ("float32", "bf16"),
        ("float32", "int8"),
    ],
)
def test_training_on_a_device_has_the_bits_of_training_on_the_cpu(
    dtype: str, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(train, dtype=getattr(torch, dtype), compression=compression)
    on_cpu = run_ranks(3, run)
    with monkeypatch.context() as patch:
        install(patch.setattr)
        on_device = run_ranks(3, run)
        alone = run_ranks(1, run)
    assert set(on_device) == set(on_cpu)
    assert len(set(on_cpu)) == 1
    assert alone == run_ranks(1, run)


def test_buckets_of_a_device_fit_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = run_ranks(2, train)
    has_device = threading.local()

    def rank(group: Any) -> str:
        has_device.here = not group.rank
        return train(group)

    install(monkeypatch.setattr, lambda tensor: getattr(has_device, "here", False))
    assert set(run_ranks(2, rank)) == set(on_cpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_microbatches_on_a_device_have_the_bits_of_one_process(dtype: Any, device: pytest.MonkeyPatch) -> None:
    run = partial(train_in_microbatches, dtype=dtype)
    found = {world: set(run_ranks(world, run, timeout=60)) for world in (1, 2, 3, 4)}
    assert len(set.union(*found.values())) == 1, found


def test_the_pinned_memory_of_a_group_is_bounded(device: pytest.MonkeyPatch) -> None:
    loans: dict[int, list[Any]] = {}
    most: dict[int, int] = {}

    def empty(count: int, **settings: Any) -> Any:
        memory = np.empty(count, np.float32)
        mine, me = loans.setdefault(threading.get_ident(), []), threading.get_ident()
        mine.append(weakref.ref(memory))
        held = sum(array.nbytes for loan in mine if (array := loan()) is not None)
        most[me] = max(most.get(me, 0), held)
        return torch.from_numpy(memory)

    device.setattr(_pinned, "torch", SimpleNamespace(empty=empty))
    device.setattr(LateStreams, "_do", lambda streams, work: work())  # copies that run late hold memory by right

    def rank(group: Any) -> None:
        sizes = [200, 700, 700, 700, 700, 300]
        layers = [torch.nn.Linear(n, m) for n, m in zip(sizes, [*sizes[1:], 1], strict=True)]
        model = DDP(torch.nn.Sequential(*layers), group, bucket_mb=0.1)
        for _ in range(4):
            model(torch.ones(2, 200)).sum().backward()
        assert _pinned.pinned_memory(group).lent == 0

    run_groups(local_groups(2, Config(pinned=1)), rank)
    largest = 4 * 700 * 700
    assert len(most) == 2
    for each in most.values():
        assert largest < each <= 2 * largest, "one bucket that is larger than the bound passes, alone"


@pytest.mark.parametrize(
    ("dtype", "settings", "autocast"),
    [
        ("float64", {}, False),
        ("float64", {"bucket_mb": 1e-3}, False),
        ("float64", {"error_feedback": False}, False),
        ("float32", {}, True),
        ("bfloat16", {}, False),
    ],
)
def test_powersgd_on_a_device_ends_where_it_ends_on_the_cpu(
    dtype: str, settings: dict[str, Any], autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(group: Any, compression: str | None = "powersgd") -> list[Any]:
        model = DDP(net(getattr(torch, dtype)), group, compression=compression, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.from_numpy(np.random.default_rng([step, group.rank]).standard_normal((4, 20)))
            loss = model(x.to(getattr(torch, dtype))).square().mean()
            optimizer.zero_grad()
            if step == 1 and group.rank == 0:
                loss = loss * np.inf  # as with a GradScaler, which then makes no update
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                model.backward(loss, weight=float(step != 2 or group.rank != 1))
            if step != 1:
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    on_cpu = run_ranks(3, run)
    install(monkeypatch.setattr)
    on_device = run_ranks(3, run)
    assert len({digest(each) for each in on_device}) == 1
    near = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-2}[dtype]
    for here, there in zip(on_cpu[0], on_device[0], strict=True):
        assert torch.isfinite(there).all()
        torch.testing.assert_close(here, there, rtol=near, atol=near)
    if "error_feedback" not in settings:  # which needs compression
        (alone,), (whole,) = run_ranks(1, run), run_ranks(1, partial(run, compression=None))
        assert digest(alone) == digest(whole), "nothing is left out where nothing travels"


class Trained:
    """A model that one rank trains, with errors for feedback."""

    def __init__(self, group: Any, compression: str = "int8") -> None:
        self.group = group
        self.model = DDP(net(), group, bucket_mb=1e-3, compression=compression)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, seed: int = 1) -> None:
        rng = np.random.default_rng([seed, self.group.rank])
        self.model.begin_step()
        self.optimizer.zero_grad()
        self.model(torch.from_numpy(rng.standard_normal((4, 20))).float()).square().mean().backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("during", "compression"),
    [
        ("a sum", "int8"),
        ("a copy", "int8"),
        ("the third bucket", "int8"),
        ("the third bucket", "powersgd"),
        ("a second sum", "powersgd"),
    ],
)
def test_a_verdict_ends_the_step_and_the_next_generation_has_the_same_bits(
    during: str, compression: str, device: pytest.MonkeyPatch
) -> None:
    """The verdict comes while links wait for a rank, or while the host waits for copies of the device."""
    start, begun = DeviceTransport.start, dict[int, list[Any]]()

    def fail(fault: Any) -> None:
        fault.settle(Verdict(1, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost"))

    def failing(transport: DeviceTransport, *args: Any, **kwargs: Any) -> Any:
        works = begun.setdefault(id(transport), [])
        if len(works) == 2:
            for work in works:  # they have succeeded, and nobody has waited for the copies back
                work.wait()
            fail(transport._group._core.mesh.fault)
        works.append(start(transport, *args, **kwargs))
        return works[-1]

    def struck(trained: Trained) -> None:
        fault = trained.group._core.mesh.fault
        if during == "a sum" and trained.group.rank:
            fail(fault)
            return
        if during in ("a sum", "a copy"):
            threading.Timer(0.2, fail, [fault]).start()
        with pytest.raises(PeerLost):
            trained.step(2)
        assert all(parameter.grad is None for parameter in trained.model.parameters())
        trained.model.drop_gradients()

    both = threading.Barrier(2)

    def failing_late(transport: DeviceTransport, bucket: Any) -> None:
        complete(transport, bucket)
        if isinstance(bucket, LowRankTensorBucket):
            both.wait(20)  # else the other rank would lose this one, and wait for a verdict
            fail(transport._group._core.mesh.fault)  # one bucket has its means

    make, complete = partial(Trained, compression=compression), DeviceTransport.complete
    groups = local_groups(2, Config(failure_timeout=0.5))
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(make, groups))
        list(pool.map(Trained.step, ranks))
        with device.context() as late:
            if during == "the third bucket":
                late.setattr(DeviceTransport, "start", failing)
            elif during == "a second sum":
                late.setattr(DeviceTransport, "complete", failing_late)
            elif during == "a copy":
                late.setattr(LateMark, "happened", lambda mark: False)
            for group in groups:
                group.hand_over()
            list(pool.map(struck, ranks))
    assert not any(_pinned.pinned_memory(group).lent for group in groups)
    for group in groups:
        group.hand_over()
    next_generation(groups)
    run_groups(groups, lambda group: ranks[group.rank].step(2))

    groups = local_groups(2)
    with ThreadPoolExecutor(2) as pool:
        undisturbed = list(pool.map(make, groups))
        list(pool.map(Trained.step, undisturbed))
    for group in groups:
        group.hand_over()
    next_generation(groups)  # PowerSGD begins with the same directions in each
    run_groups(groups, lambda group: undisturbed[group.rank].step(2))
    ranks += undisturbed
    assert len({digest(each.model.parameters()) for each in ranks}) == 1  # nothing has undone the change of buffers


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_backward_on_a_device_runs_in_a_thread_of_autograd(wrap: Any, device: pytest.MonkeyPatch) -> None:
    def rank(group: Any) -> None:
        model = wrap(net(), group)
        for _ in range(2):
            loss = model(torch.ones(4, 20)).mean()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join(20)
            assert all(parameter.grad is not None for parameter in model.parameters())
        group.barrier()

    run_ranks(2, rank)


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_and_a_change_inside_unshard_are_both_kept(world: int, device: pytest.MonkeyPatch) -> None:
    def rank(group: Any) -> None:
        model = FSDP(torch.nn.Linear(4, 1), group)
        model(torch.ones(2, 4)).mean().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.state_dict()
        with model.unshard() as whole, torch.no_grad():
            optimizer.step()
            whole["bias"].fill_(7.0)
        after = model.state_dict()
        torch.testing.assert_close(after["weight"], before["weight"] - 1)
        assert after["bias"].tolist() == [7.0]

    run_ranks(world, rank)


def test_an_error_of_a_device_names_the_card() -> None:
    class Event:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: unspecified launch failure\nCompile with this or that.")

    for properties, name in (
        (SimpleNamespace(name="NVIDIA H200", uuid="7ac7"), r"cuda:1 \(NVIDIA H200, 7ac7\)"),
        (SimpleNamespace(name="Max 1550"), r"cuda:1 \(Max 1550, no UUID\)"),
    ):
        mark = Mark(Event(), _device_streams._title(torch.device("cuda", 1), properties))
        with pytest.raises(RuntimeError, match=f"^{name} has failed: CUDA error: unspecified launch failure$"):
            mark.happened()


def test_a_backward_pass_in_a_cuda_graph_is_refused(device: pytest.MonkeyPatch) -> None:
    def rank(group: Any) -> None:
        trained = Trained(group)
        with device.context() as recording:
            recording.setattr(LateStreams, "captures", lambda streams: True)
            with pytest.raises(UnsupportedOp, match="a CUDA graph captures this backward pass"):
                trained.step()
        trained.step()

    run_groups(local_groups(1), rank)


def test_an_error_of_the_device_fails_the_step_on_all_ranks(device: pytest.MonkeyPatch) -> None:
    def happened(mark: LateMark) -> bool:
        raise RuntimeError("CUDA error: the device is gone")

    # The group's barrier would not do: the error of a fast rank's step may reach a rank that is still in it.
    both = threading.Barrier(2, lambda: device.setattr(LateMark, "happened", happened))

    def rank(group: Any) -> BaseException | None:
        trained = Trained(group)
        trained.step()
        both.wait()
        try:
            trained.step()
        except (PacelineError, RuntimeError) as error:
            assert all(parameter.grad is None for parameter in trained.model.parameters())
            return error
        return None

    errors = run_groups(local_groups(2, Config(failure_timeout=0.5)), rank)
    assert all(errors), errors
    assert any("the device is gone" in str(error) for error in errors), errors
