"""Pinned host memory, through which gradients come from a device and go back. A group has a bounded amount of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from paceline._base.waits import SLICE
from paceline._group import Group
from paceline.torch._tensors import Tensor


class PinnedMemory:
    """Lends memory to the buckets of a group, and has the next one wait while too much is lent. Thread-safe.

    All ranks send the buckets of a group in one order, so the first one under way always ends, even if other threads
    wait for a loan. That is not so for the buckets of two groups, so each group has its own memory. torch keeps memory
    that was given back for the next loan of the size, and waits for copies that still run.

    Args:
        most_bytes: what may be lent at a time; a loan that is larger by itself is made when there is no other.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.RLock()  # entered in C: an interrupt cannot leave it locked, as it can a Condition
        self._returned = threading.Condition(self._lock)
        self._loans: dict[int, int] = {}
        """Bytes of each loan, by the identity of its tensor."""

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        return sum(self._loans.values())

    def lend(self, count: int, dtype: Any, device: Any, check: Callable[[], None]) -> Tensor:
        """Returns an uninitialised tensor for copies from and to a device, shape [count].

        Args:
            count: elements.
            dtype: torch's.
            device: the other side of the copies; memory for a CPU is not pinned.
            check: raises if the caller need not wait any more.
        """
        nbytes = count * dtype.itemsize
        with self._lock:
            while self._loans and self.lent + nbytes > self._most_bytes:
                check()
                self._returned.wait(SLICE)
            found = torch.empty(count, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")
            self._loans[id(found)] = nbytes
        return found

    def take_back(self, tensor: Tensor) -> None:
        """Ends a loan, unless it has ended. Copies that were enqueued before may still run."""
        with self._lock:
            self._loans.pop(id(tensor), None)
            self._returned.notify_all()


_of_groups: WeakKeyDictionary[Group, PinnedMemory] = WeakKeyDictionary()


def pinned_memory(group: Group) -> PinnedMemory:
    """Returns the pinned memory of a group."""
    if group not in _of_groups:
        _of_groups[group] = PinnedMemory(group._core.pinned_bytes)
    return _of_groups[group]
