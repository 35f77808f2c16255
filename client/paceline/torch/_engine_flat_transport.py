"""FSDP's gathers and scatters on a device, by an engine (`FlatTransport`).

    shard, on the host -> pinned memory -> this rank's part, on the device -> all parts, gathered there by the engine
    gradients, on the device -> this rank's part of their sums -> pinned memory -> the shard's gradient, on the host

So each rank copies only its own shard between host and device, where links need all of a unit in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline._base.work import Work
from paceline._group import Group
from paceline._parallel._buckets import Empty
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._flat_transport import Gathering
from paceline.engines import DataEngine, OnDevice
from paceline.errors import UnsupportedOp
from paceline.torch._device_streams import TO_DEVICE, TO_HOST, await_mark, streams_of
from paceline.torch._pinned import pinned_memory
from paceline.torch._tensor_transports import check_place
from paceline.torch._tensors import Tensor, array_of, on_host, torch_dtype


class EngineFlatTransport:
    """A `FlatTransport` for one device, and the ranks of one group, whose engine is open."""

    def __init__(self, ranks: Group, engine: DataEngine, device: Any) -> None:
        self._ranks = ranks
        self._sums = engine.traits.dtypes
        self._device = device
        self._streams = streams_of(device)
        self._pinned = pinned_memory(ranks)

    def gather(self, shard: NDArray[Any], dtype: np.dtype[Any], label: str) -> Gathering:
        """See `FlatTransport`."""
        whole = self.empty(shard.size * self._ranks.size, dtype)
        allocated = self._streams.mark()  # kernels in front of it may still use this memory
        pinned = self._lend(shard.size, whole.dtype)
        try:
            sent = array_of(pinned)
            sent[...] = shard
            with self._streams.aside(TO_DEVICE):
                self._streams.wait_for(allocated)
                self._streams.copy(self._part(whole), pinned)
                self._streams.keep(whole)
                copied = self._streams.mark()
            # As bytes, which every engine gathers.
            work = self._ranks._core.all_gather_carried(OnDevice(whole.view(torch.uint8), copied), label=label)
            work.on_done(partial(self._pinned.take_back, pinned))
        except BaseException:
            self._pinned.take_back(pinned)
            raise
        return Gathering(whole, sent, work)

    def keep(self, whole: Tensor) -> None:
        """See `FlatTransport`."""
        self._streams.keep(whole)

    def empty(self, count: int, dtype: np.dtype[Any]) -> Tensor:
        """See `FlatTransport`."""
        return torch.empty(count, dtype=torch_dtype(dtype), device=self._device)

    def scatter(self, whole: Tensor, dtype: np.dtype[Any], empty: Empty, label: str) -> Work[NDArray[Any]]:
        """See `FlatTransport`."""
        if dtype.name in self._sums:
            whole = whole.to(torch_dtype(dtype))
        written = self._streams.mark()
        pinned = self._lend(len(whole) // self._ranks.size, whole.dtype)
        try:
            with self._ranks._core.surrounded(partial(self._bring_home, whole, pinned, empty)):
                work = self._ranks._core.reduce_scatter_carried(OnDevice(whole, written), label=label)
            work.on_done(partial(self._pinned.take_back, pinned))
        except BaseException:
            self._pinned.take_back(pinned)
            raise
        return work

    def _bring_home(
        self, whole: Tensor, pinned: Tensor, empty: Empty, run: Callable[[], Any], deadline: float
    ) -> NDArray[Any]:
        """Runs a scatter, and copies this rank's sums to the host; in the group's thread."""
        run()
        with self._streams.here():
            with self._streams.aside(TO_HOST):
                self._streams.wait_for(None)  # the host has waited for the sums
                self._streams.copy(pinned, self._part(whole))
                self._streams.keep(whole)
                copied = self._streams.mark()
            await_mark(copied, self._ranks._core.mesh.fault.check, deadline)
        sums = array_of(pinned)
        home = empty(sums.size, sums.dtype)
        home[...] = sums
        return home

    def _part(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._ranks.size)[self._ranks.rank]

    def _lend(self, count: int, dtype: Any) -> Tensor:
        return self._pinned.lend(count, dtype, self._device, self._ranks._core.mesh.fault.check)


def transport_of(ranks: Group, parameters: Sequence[Parameter]) -> EngineFlatTransport | None:
    """Makes the transport of a flat array if its parameters are on a device, and the group has an engine.

    Raises:
        UnsupportedOp: the engine has no gathers and scatters on this device, or the parameters are on several.
    """
    tensors = [parameter.tensor for parameter in parameters]  # type: ignore[attr-defined]
    engine = None if all(map(on_host, tensors)) else ranks._core.open_engine()
    if engine is None:
        return None
    device = tensors[0].device
    if others := {str(tensor.device) for tensor in tensors} - {str(device)}:
        raise UnsupportedOp(
            f"a unit of FSDP has parameters on {device} and {', '.join(sorted(others))}: move them to one device"
        )
    check_place(engine, device)
    if not engine.traits.shards:
        raise UnsupportedOp(
            f"the engine {engine.name!r} has no all_gather and reduce_scatter, which FSDP needs on a device: name "
            "another engine, or none"
        )
    return EngineFlatTransport(ranks, engine, device)
