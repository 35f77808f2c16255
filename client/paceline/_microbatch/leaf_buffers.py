"""Makes a module's buffers independent of how many microbatches a rank computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._base.sum_order import EVEN, SumOrder

_FIRST = (0, 1)


class LeafBuffers:
    """The buffers of one wrapper's module.

    Each microbatch begins with the buffers that the step began with. After the step all ranks have microbatch 0's: they
    take them from the rank that gives the sum with it. It has computed microbatch 0, in this attempt or in the
    one that it kept the sum from. So the buffers are kept like the sum. `order` is the turn of the last microbatch that
    has begun.
    """

    def __init__(self) -> None:
        self.order = EVEN
        self._before: list[NDArray[Any]] = []
        self._of_first: list[NDArray[Any]] = []

    def begin(self, order: SumOrder, buffers: Mapping[str, NDArray[Any]]) -> None:
        """Begins a microbatch, before its first forward pass."""
        self.order = order
        if order.is_first or order.is_check:
            self._before = [buffer.copy() for buffer in buffers.values()]
        else:
            _write(self._before, buffers)

    def restore(self, buffers: Mapping[str, NDArray[Any]]) -> None:
        """Undoes what a microbatch has changed that does not count."""
        _write(self._before, buffers)

    def end(self, order: SumOrder, buffers: Mapping[str, NDArray[Any]]) -> None:
        """Ends a microbatch, after its backward pass."""
        if order.leaf == _FIRST:
            self._of_first = [buffer.copy() for buffer in buffers.values()]
        if order.is_root and order.is_last:
            _write(self._of_first, buffers)


def _write(values: Sequence[NDArray[Any]], buffers: Mapping[str, NDArray[Any]]) -> None:
    for value, buffer in zip(values, buffers.values(), strict=True):
        np.copyto(buffer, value)
