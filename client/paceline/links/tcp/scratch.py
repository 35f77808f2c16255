"""Memory for payloads that nobody has a place for, used again once its reader has released it.

Fresh memory costs more than copying into it (page faults), and most readers release each frame before the next.
"""

from __future__ import annotations

from collections import deque

import numpy as np

__all__ = ["Scratch"]

_KEPT = 8
"""Buffers that are remembered, in use and free each: what is never released is left to the garbage collector."""


class Scratch:
    """Buffers of one half. Not thread-safe."""

    def __init__(self) -> None:
        self._taken: deque[memoryview] = deque(maxlen=_KEPT)
        self._free: list[memoryview] = []

    def take(self, size: int) -> memoryview:
        """That many bytes, of undefined content."""
        for number, buffer in enumerate(self._free):
            if size <= len(buffer) <= 2 * size:  # a short payload must not hold a long buffer
                del self._free[number]
                break
        else:
            buffer = np.empty(size, np.uint8).data
        self._taken.append(buffer)
        return buffer[:size]

    def release(self, keep: memoryview | None = None) -> None:
        """Nobody reads any of them any more, but for the one to keep."""
        if self._taken:
            still = [buffer for buffer in self._taken if keep is not None and buffer.obj is keep.obj]
            self._free = [
                *(buffer for buffer in self._taken if keep is None or buffer.obj is not keep.obj),
                *self._free,
            ][:_KEPT]
            self._taken = deque(still, _KEPT)
