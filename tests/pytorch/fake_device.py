"""Tensors on the CPU that are taken for those of a device, and streams whose copies happen as late as they may.

Nothing may see such a tensor through NumPy. A copy in a stream of its own is done when somebody waits for a mark behind
it, and not before. Code that reads the target earlier finds the old values, which are NaN in pinned memory.

    python tests/pytorch/fake_device.py SCRIPT ARGS...      # runs a script on such a device
"""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import paceline.torch
from paceline._elastic import device_array, foreign
from paceline.torch import _c10d_engine, _device_streams, _pinned, _tensors
from paceline.torch._device_streams import DeviceStreams, Mark

LOOKS = 2
"""How often a mark is looked at before it has happened."""

ON_DEVICE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pytorch.fake_device import install
install(setattr)
"""
"""The first lines of a worker's script, whose models are then on such a device."""

Patch = Callable[[Any, str, Any], None]


class LateMark(Mark):
    """A point in a stream's queue; None for a stream that does its work at once."""

    def __init__(self, streams: LateStreams, use: str | None, place: int) -> None:
        self._streams, self._use, self._place = streams, use, place
        self._looks = 0

    def happened(self) -> bool:
        """Does the work in front of it at the last of some looks."""
        self._looks += 1
        if self._looks > LOOKS:
            self.reach()
        return self._use is None or self._looks > LOOKS

    def reach(self) -> None:
        """Does the work in front of it."""
        if self._use is not None:
            self._streams.run(self._use, self._place)


def _nothing() -> None:
    pass


class LateStreams(DeviceStreams):
    """The streams of a fake device. The script's own does its work at once."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.RLock()
        self._queues: dict[str, list[Callable[[], None]]] = {}
        self._done: dict[str, int] = {}
        self._latest: Mark | None = None
        """The latest mark in the script's own stream, which a copy to the host must wait for."""
        self._awaited: Mark | str | None = "nothing"
        """The last mark that the stream for copies to the host has waited for; None if the host has waited."""

    @property
    def _use(self) -> str | None:
        return getattr(self._local, "use", None)

    def run(self, use: str, until: int) -> None:
        """Does what a stream was given up to a place; copies to the device may come before one to the host."""
        with self._lock:
            if use == _device_streams.TO_HOST:
                self.run(_device_streams.TO_DEVICE, len(self._queues.get(_device_streams.TO_DEVICE, ())))
            while self._done.get(use, 0) < until:
                place = self._done.get(use, 0)
                self._done[use] = place + 1
                self._queues[use][place]()
                self._queues[use][place] = _nothing  # which refers to no memory

    def mark(self, stream: Any = None) -> Mark:
        """See `DeviceStreams`."""
        use = self._use
        mark = LateMark(self, use, len(self._queues.get(use or "", ())))
        if use is None:
            self._latest = mark
        return mark

    def current(self) -> Any:
        """See `DeviceStreams`."""
        return self._use or threading.current_thread().name

    def captures(self) -> bool:
        """See `DeviceStreams`."""
        return False

    def wait_for(self, mark: Mark | None) -> None:
        """See `DeviceStreams`."""
        assert mark is None or isinstance(mark, LateMark)
        if mark is not None:
            self._do(mark.reach)
        if self._use == _device_streams.TO_HOST:
            self._awaited = mark

    def here(self) -> Any:
        """See `DeviceStreams`."""
        return nullcontext()

    def new(self) -> str:
        """See `DeviceStreams`."""
        return "sums"

    @contextmanager
    def aside(self, use: str) -> Iterator[None]:
        """See `DeviceStreams`."""
        self._local.use = use
        if use == _device_streams.TO_HOST:
            self._awaited = "nothing"
        try:
            yield
        finally:
            self._local.use = None

    def copy(self, target: Any, source: Any) -> None:
        """See `DeviceStreams`."""
        if self._use == _device_streams.TO_HOST:
            assert self._awaited in (None, self._latest), "a copy to the host does not wait for the last write"
        self._do(lambda: target.copy_(source))

    def keep(self, tensor: Any) -> None:
        """See `DeviceStreams`."""

    def _do(self, work: Callable[[], None]) -> None:
        if self._use is None:
            work()
        else:
            with self._lock:
                self._queues.setdefault(self._use, []).append(work)


def install(patch: Patch, on_device: Callable[[Any], bool] = lambda tensor: True) -> None:
    """Makes tensors on the CPU those of a device; `patch` sets an attribute of a module or class."""
    for name in paceline.torch.__all__:
        getattr(paceline.torch, name)  # a module that is not loaded yet would not be patched
    lend = _pinned.PinnedMemory.lend

    def lend_nan(*args: Any, **kwargs: Any) -> Any:
        return lend(*args, **kwargs).fill_(float("nan"))

    patch(_pinned.PinnedMemory, "lend", lend_nan)

    def late_called(group: Any, call: Any) -> Any:
        """Calls a library for the CPU, which knows no marks, behind all that it must wait for."""
        if getattr(call.x, "written", None) is not None:
            call.x.written.reach()
        return called(group, call)

    called = _c10d_engine.called
    replaced = {
        called: late_called,
        _tensors.on_host: lambda tensor: not on_device(tensor),
        _device_streams.streams_of: lambda device: LateStreams(),
    }
    for module in [each for name, each in sys.modules.items() if name.startswith("paceline.torch")]:
        for name, value in list(vars(module).items()):
            if getattr(value, "__hash__", None) is not None and callable(value) and value in replaced:
                patch(module, name, replaced[value])
    for module in (foreign, device_array):
        patch(module, "is_on_device", lambda value: isinstance(value, torch.Tensor) and on_device(value))


if __name__ == "__main__":
    install(setattr)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
