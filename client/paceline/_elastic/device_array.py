"""An array on a device, in a training state: its bytes come to the host in parcels, when somebody asks for them.

NumPy cannot view this memory. Large state does not change between two updates, so a copy of a part of it is as good as
a view, and a reader copies only the part that it needs. Imports no framework. Tests take tensors on the CPU for
tensors on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UnsupportedOp

_PARCEL_BYTES = 32 << 20
"""Bytes that are copied through pinned memory at a time."""


def is_on_device(value: Any) -> bool:
    """True for an array of a framework that does not lie in host memory."""
    return getattr(getattr(value, "device", None), "type", "cpu") != "cpu"


def on_host(array: Any) -> Any:
    """Returns an array itself, or a copy of a `DeviceArray`."""
    return array.copy() if isinstance(array, DeviceArray) else array


def memory_of(value: Any) -> NDArray[Any]:
    """Returns a NumPy view of the memory of a framework's array in host memory."""
    if str(getattr(value, "dtype", "")).endswith(".bfloat16"):  # NumPy's comes from `ml_dtypes`, unknown to frameworks
        import ml_dtypes  # here, because few jobs need it and it costs start-up time

        module = sys.modules[type(value).__module__.partition(".")[0]]
        return memory_of(value.view(module.int16)).view(ml_dtypes.bfloat16)
    numpy = getattr(value, "numpy", None)
    array = numpy() if callable(numpy) else None
    if not isinstance(array, np.ndarray):
        raise UnsupportedOp(f"the memory of a {type(value).__name__} cannot be read as an array")
    return array


class DeviceArray:
    """An array of a framework on a device; shared, not copied. Its `address` tells the memory from others."""

    def __init__(self, array: Any, *, parcel_bytes: int = _PARCEL_BYTES) -> None:
        self._array = array.detach()
        self._module = sys.modules[type(array).__module__.partition(".")[0]]
        self.shape = tuple(array.shape)
        self.dtype = memory_of(self._module.empty(1, dtype=array.dtype, device="cpu")).dtype
        self.size = prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._parcel_elements = max(1, parcel_bytes // self.dtype.itemsize)
        self.address = int(array.data_ptr())

    @classmethod
    def joined(cls, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """Returns a copy of some arrays of one `kind`, one after the other, on their device."""
        return cls(arrays[0]._module.cat([array._array.reshape(-1) for array in arrays]))

    @property
    def kind(self) -> tuple[Any, Any]:
        """The device and the dtype."""
        return self._array.device, self.dtype

    def parcel(self, first: int, count: int, stride: int = 1) -> NDArray[Any]:
        """Returns a copy of every `stride`-th of `count` elements, fewer at the end of the array, in C order."""
        part = self._array.reshape(-1)[first : first + count : stride]
        return memory_of(self._pinned(part.numel()).copy_(part))

    def copy(self, order: str = "C") -> NDArray[Any]:
        """Returns a copy of the whole array in ordinary memory, in C order."""
        del order
        flat = np.empty(self.size, self.dtype)
        count = self._parcel_elements
        for first in range(0, self.size, count):
            flat[first : first + count] = self.parcel(first, count)
        return flat.reshape(self.shape)

    def write(self, values: Any) -> None:
        """Copies values of the same shape into the array."""
        flat = np.asarray(values, self.dtype).reshape(-1)
        if not self._array.is_contiguous():  # as with torch.channels_last: no part of it can be named in C order
            staged = self._pinned(self.size)
            np.copyto(memory_of(staged), flat)
            self._array.copy_(staged.view(self.shape))
            return
        target = self._array.view(-1)
        count = self._parcel_elements
        for first in range(0, self.size, count):
            part = flat[first : first + count]
            staged = self._pinned(part.size)
            np.copyto(memory_of(staged), part)
            target[first : first + count].copy_(staged)

    def finish(self) -> None:
        """Waits until the device has done everything that was enqueued, so that other threads may read."""
        if self._array.device.type != "cpu":
            getattr(self._module, self._array.device.type).synchronize(self._array.device)

    def _pinned(self, count: int) -> Any:
        pins = self._array.device.type == "cuda"
        return self._module.empty(count, dtype=self._array.dtype, device="cpu", pin_memory=pins)


def copies(arrays: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Returns a copy of each array. Those on one device come together, so that the host waits once."""
    together: dict[Any, dict[str, DeviceArray]] = {}
    for path, array in arrays.items():
        if isinstance(array, DeviceArray):
            together.setdefault(array.kind, {})[path] = array
    found = {path: array.copy() for path, array in arrays.items() if not isinstance(array, DeviceArray)}
    for some in together.values():
        whole = DeviceArray.joined(list(some.values())).copy()
        parts = np.split(whole, np.cumsum([array.size for array in some.values()])[:-1])
        found |= {path: part.reshape(array.shape) for (path, array), part in zip(some.items(), parts, strict=True)}
    return {path: found[path] for path in arrays}


class DeviceBytes:
    """The bytes of a `DeviceArray`, in C order."""

    def __init__(self, array: DeviceArray) -> None:
        self._array = array
        self.size = array.nbytes

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        """Returns a copy of the bytes from `part.start` to `part.stop`."""
        low, high, _ = part.indices(self.size)
        itemsize = self._array.dtype.itemsize
        first = low // itemsize
        elements = self._array.parcel(first, -(-high // itemsize) - first)
        return elements.view(np.uint8)[low - first * itemsize : high - first * itemsize]
