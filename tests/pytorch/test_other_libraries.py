"""A library of c10d that Paceline knows nothing of, here Gloo in UCC's place: it meets in a store and sums shares."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
from unit.engines.fake_engine import engines_of

from paceline.engines import OnDevice
from paceline.engines._engine_check import open_engines

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")

from paceline.torch._device_engine import DeviceEngine

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]

calls: list[str] = []


class Library:
    """Gloo, as UCC would be: its ranks meet in two rounds, it has no `allreduce` that will do, and tells no errors."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        for turn in ("first", "second"):
            store.set(f"{turn}/{rank}", turn)
            store.wait([f"{turn}/{other}" for other in range(size)])
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def get_error(self) -> Any:
        raise RuntimeError("Backend ucc does not support getError")

    def __getattr__(self, name: str) -> Any:
        if name not in ("_reduce_scatter_base", "_allgather_base", "abort", "shutdown"):
            raise AttributeError(name)
        calls.append(name)
        return getattr(self._gloo, name)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(dist, "ProcessGroupUCC", Library, raising=False)
    calls.clear()
    with engines_of(partial(DeviceEngine, "ucc", torch.device("cpu")), 3) as made:
        yield made


@pytest.mark.parametrize("size", [1, 7, 100_003])
def test_all_ranks_get_the_same_bits_of_a_sum(size: int, engines: list[Any]) -> None:
    open_engines(engines)
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    exact = torch.stack(tensors).double().sum(0)

    def add_up(engine: Any, x: Any) -> None:  # on the CPU a call of c10d is over when its stream has waited
        engine.all_reduce(OnDevice(x)).wait(monotonic() + 20)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add_up, engines, tensors))
    assert torch.allclose(tensors[0].double(), exact, atol=1e-5)
    assert all(torch.equal(x, tensors[0]) for x in tensors)
    assert calls.count("_reduce_scatter_base") == calls.count("_allgather_base") == 6  # each made one to open
    for engine in engines:
        assert engine._lose_if_broken() == ""
        engine.close(monotonic() + 5)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-engine")]
