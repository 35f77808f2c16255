"""Arrays written into others in place, all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.tree import Leaf
from paceline.errors import SizeMismatch

__all__ = ["check_fit", "write"]


def write(here: Mapping[str, Leaf], there: Mapping[str, Any]) -> None:
    """Copies arrays into those of the same path, in place; of a whole array into a shard what belongs there.

    Args:
        here: where to.
        there: arrays or shards; None in place of one that is spread leaves it as it is.

    Raises:
        SizeMismatch: paths or shapes differ; nothing was changed.
    """
    check_fit(here, there)
    for path, array in here.items():
        other = there[path]
        if not isinstance(array, Shard):
            np.copyto(array, other)
        elif other is not None:
            values = array.values.reshape(-1)
            whole = not isinstance(other, Shard)
            flat = np.asarray(other if whole else other.values).reshape(-1)
            np.copyto(values, flat[array.start : array.start + values.size] if whole else flat)


def check_fit(here: Mapping[str, Leaf], there: Mapping[str, Any]) -> None:
    """Makes sure that `write` can be done.

    Raises:
        SizeMismatch: paths or shapes differ, or values are of another kind.
    """
    odd = [f"{path} is on one side only" for path in sorted(here.keys() ^ there.keys())]
    for path in sorted(here.keys() & there.keys()):
        mine, other = here[path], there[path]
        if isinstance(mine, Shard) and other is None:
            continue
        if isinstance(other, Shard) and not (
            isinstance(mine, Shard) and (mine.start, mine.values.size) == (other.start, other.values.size)
        ):
            odd.append(f"{path} has {other.values.size} elements from {other.start}, which are not those held here")
            continue
        (kind, shape), (their_kind, their_shape) = _kind(mine), _kind(other)
        if shape != their_shape or not np.can_cast(their_kind, kind, "same_kind"):
            odd.append(f"{path} is {their_kind}{list(their_shape)}, not {kind}{list(shape)}")
    if odd:
        raise SizeMismatch(f"the state does not fit: {'; '.join(odd[:8])}")


def _kind(leaf: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of the whole array."""
    if isinstance(leaf, Shard):
        return leaf.values.dtype, leaf.shape
    array = np.asarray(leaf)
    return array.dtype, array.shape
