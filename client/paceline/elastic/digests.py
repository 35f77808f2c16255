"""Where the states of members differ, in words."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.tree import split
from paceline.elastic.state import TrainState

__all__ = ["crc_of", "digests_of", "where_they_differ"]

_MOST_NAMES = 6
"""Names in a text: of so many of a model's arrays one sees which part it is."""


def digests_of(state: TrainState) -> dict[str, int]:
    """32 bits of each array that every member has whole, and of all else that a part has; the same names everywhere."""
    arrays = {name: crc_of(array) for name, array in state.named().items()}
    return {**arrays, **{name: crc_of(part.rest()) for name, (_, part) in state.objects.items()}}


def where_they_differ(names: Sequence[str], digests: NDArray[np.uint32]) -> str:
    """Which arrays and parts are not the same at all members.

    Args:
        names: of `digests_of`.
        digests: shape [W, number of names].
    """
    odd = [name for name, differs in zip(names, (digests != digests[0]).any(axis=0), strict=True) if differs]
    if not odd:  # the word is of the state, and of whether the update ran
        return "optimizer.step() ran in the step before at some of them only"
    more = f" and {len(odd) - _MOST_NAMES} more" if len(odd) > _MOST_NAMES else ""
    return f"they differ in {', '.join(odd[:_MOST_NAMES])}{more}"


def crc_of(tree: Any) -> int:
    """CRC-32 of nested values.

    Raises:
        UnsupportedOp: there is one that could not be kept in a checkpoint.
    """
    skeleton, arrays = split(tree)
    crc = zlib.crc32(json.dumps(skeleton, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, zlib.crc32(name.encode(), crc))
    return crc
