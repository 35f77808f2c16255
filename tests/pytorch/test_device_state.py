"""The training state of a model on a device: parcels leave it, and values come back to it.

Tensors on the CPU are taken for a device's: then nothing may see them through NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline import ElasticSampler, TrainState
from paceline._elastic import foreign
from paceline._elastic.device_array import DeviceArray, DeviceBytes
from paceline._elastic.differences import digests_of, partial_digest
from paceline._elastic.offer import CHUNK_BYTES, Description, OfferedState
from paceline_protocol import Tag

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All tensors lie on a device; yields the elements of each copy to the host."""
    monkeypatch.setattr(foreign, "is_on_device", lambda value: isinstance(value, torch.Tensor))
    copies: list[int] = []
    parcel = DeviceArray.parcel

    def copying(array: DeviceArray, first: int, count: int, stride: int = 1) -> Any:
        found = parcel(array, first, count, stride)
        copies.append(found.size)
        return found

    monkeypatch.setattr(DeviceArray, "parcel", copying)
    return copies


def state(seed: int = 1, dtype: Any = None, optimizer: str = "SGD") -> tuple[Any, Any, TrainState]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.BatchNorm1d(900), torch.nn.Linear(900, 3))
    model = model.to(dtype or torch.float32)
    name, fused = optimizer.removesuffix(" fused"), optimizer.endswith(" fused")
    updates = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=fused)
    model(torch.randn(4, 700).to(dtype or torch.float32)).square().mean().backward()
    updates.step()
    updates.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=float(2**seed))
    sampler = ElasticSampler(10, global_batch=4)
    return model, scaler, TrainState(model=model, optimizer=updates, scaler=scaler, sampler=sampler)


def same(first: Any, second: Any) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_copied_to_a_newcomer_in_chunks(dtype: str, optimizer: str, copied: list[int]) -> None:
    model, _, ours = state(1, getattr(torch, dtype), optimizer)
    other, scaler, theirs = state(2, getattr(torch, dtype), optimizer)
    assert not same(model, other)
    tag = Tag(7, 0)
    offered = OfferedState()
    offered.offer(tag, ours._core.offered())
    assert sum(copied) == 2 * 900 + 1, "an offer copies buffers, and no parameters or moments"
    told = offered.describe(tag)
    described = Description.from_json(told.to_json(), told.hashes, 1 << 30)
    content, _ = described.allocate(theirs._core.offered().arrays)
    copied.clear()
    for chunk in range(content.chunks):
        content.write(chunk, offered.read(tag, chunk))
    assert max(copied) * 2 <= CHUNK_BYTES, "one chunk is copied at a time"
    theirs.load_state_dict(content.tree())
    assert same(model, other)
    assert theirs.fingerprint() == ours.fingerprint()
    assert scaler.get_scale() == 2.0


def test_an_offer_copies_no_moments_on_the_cpu_either() -> None:
    _, _, ours = state(optimizer="AdamW")
    moments = [value for each in ours._core.given["optimizer"].state.values() for value in each.values() if value.ndim]
    offered = list(ours._core.offered().arrays.values())
    for moment in moments:
        assert any(np.shares_memory(moment.numpy(), array) for array in offered)


def test_the_buffers_of_a_step_are_copied_with_one_wait_for_each_dtype(copied: list[int]) -> None:
    _, _, ours = state()
    copied.clear()
    ours._core.small()
    assert sorted(copied) == [1, 2 * 900], "a count, and running mean and variance"


def test_a_digest_copies_one_window(copied: list[int]) -> None:
    model, _, ours = state()
    large = ours._core.large()
    copied.clear()
    on_device = [partial_digest(large, step) for step in range(40)]
    assert max(copied) == 1024
    arrays = [parameter.detach().numpy() for parameter in model.parameters()]
    assert on_device == [partial_digest(arrays, step) for step in range(40)]


def test_undo_restores_buffers_without_copying_parameters(copied: list[int]) -> None:
    model, scaler, ours = state(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied.clear()
    small = ours._core.small()
    assert sum(copied) == 2 * 900 + 1, "running mean and variance, and a count"
    scaler.scale(model(torch.randn(4, 700)).mean())
    scaler.update(1.0)
    ours._core.undo(small)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert scaler.get_scale() == 8.0


def test_device_bytes_may_be_sliced_inside_an_element() -> None:
    tensor = torch.arange(100, dtype=torch.float64)
    found = DeviceBytes(DeviceArray(tensor))
    whole = tensor.numpy().view(np.uint8)
    for low, high in ((0, 800), (3, 21), (8, 16), (799, 800), (5, 5)):
        assert found[low:high].tobytes() == whole[low:high].tobytes()


def test_copy_and_write_go_in_parcels() -> None:
    tensor = torch.randn(7, 11)
    array = DeviceArray(tensor, parcel_bytes=64)
    copy = array.copy()
    assert copy.tobytes() == tensor.numpy().tobytes()
    array.write(copy + 1)
    assert tensor.numpy().tobytes() == (copy + 1).tobytes()


def test_a_channels_last_tensor_is_written_and_keeps_its_layout() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    values = np.random.default_rng(1).standard_normal((2, 3, 4, 5)).astype(np.float32)
    DeviceArray(tensor).write(values)
    assert tensor.numpy().tobytes() == values.tobytes()
    assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_equal_states_have_equal_digests_and_others_differ(copied: list[int]) -> None:
    assert digests_of(state()[2]._core) == digests_of(state()[2]._core)
    assert digests_of(state(1)[2]._core) != digests_of(state(2)[2]._core)
