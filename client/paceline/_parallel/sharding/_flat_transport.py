"""The interface through which an engine gathers a unit's values and sums its gradients on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline._base.work import Work
from paceline._group import Group
from paceline._parallel._buckets import Empty
from paceline._parallel._parameter import Parameter


class Gathering(NamedTuple):
    """The gathering of a flat array, under way."""

    whole: Any
    """All values with padding, shape [W * S]: an array, or a tensor on a device."""
    sent: NDArray[Any]
    """The copy of this rank's shard that was sent, shape [S]; the shard itself if that is gathered in place."""
    work: Work[Any]
    """Done once `whole` has the values."""


class FlatTransport(Protocol):
    """Gathers values on a device, and sums gradients there, for the ranks that have the shards of a flat array.

    The shards stay on the host. W, S: see `FlatLayout`.
    """

    def gather(self, shard: NDArray[Any], dtype: np.dtype[Any], label: str) -> Gathering:
        """Starts to gather the shards of all ranks on the device, converted to a dtype. Copies the shard at once."""

    def keep(self, whole: Any) -> None:
        """Keeps the memory of gathered values, once nobody refers to it, until the calling thread has used it."""

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Returns memory on the device, shape [count]."""

    def scatter(self, whole: Any, dtype: np.dtype[Any], empty: Empty, label: str) -> Work[NDArray[Any]]:
        """Starts to sum memory from `empty`, shape [W * S], over all ranks.

        Args:
            whole: the memory, not to be used any more.
            dtype: dtype in which it travels, if the engine can sum it; else its own.
            empty: allocates the result.
            label: see `Group.all_reduce`.

        Returns:
            This rank's shard of the sums on the host, shape [S].
        """


MakeTransport: TypeAlias = Callable[[Group, Sequence[Parameter]], FlatTransport | None]
"""Makes the transport of a flat array for the ranks that have its shards; None for links. A collective."""
