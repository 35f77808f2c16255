"""The step word: the one small all_reduce by which all members of a view enter a step together. Pure.

It completes at a member only when every member has entered the step: so whoever applies a step knows that nobody is
behind, and when the next word completes, that everybody has applied it (I1). It carries what all must know alike:
requests, latched at entry and OR-ed, and a digest of a part of the state, another one in each step, so that members
whose bits have drifted apart find out (I5).

Layout: uint64 [flags, digest, ~digest], reduced with bitwise or. All digests are equal exactly if digest ^ ~digest is
still all ones. The step's number is in the operation's signature, which every frame is compared by.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Flag", "agrees", "flags_of", "partial_digest", "word"]

_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

_WINDOW_BYTES = 1 << 16
"""Bytes of state that go into one digest: 10 us of CRC-32."""


class Flag(enum.IntFlag):
    """What a member asks of all."""

    JOIN = 1
    """Newcomers are ready: meet after this step."""
    LEAVE = 2
    """The member wants to go: meet after this step."""


def word(flags: Flag, digest: int) -> NDArray[np.uint64]:
    """What one member puts in, shape [3]."""
    return np.array([int(flags), digest, int(_ALL) ^ digest], np.uint64)


def flags_of(reduced: NDArray[np.uint64]) -> Flag:
    """What any member asked."""
    return Flag(int(reduced[0]))


def agrees(reduced: NDArray[np.uint64]) -> bool:
    """True if all put the same digest in."""
    return bool(reduced[1] ^ reduced[2] == _ALL)


def partial_digest(arrays: Sequence[NDArray[Any]], step: int) -> int:
    """CRC-32 of a window of one of the arrays; the next step takes the next array, the next round the next window.

    Args:
        arrays: the state, alike on every member.
        step: number of the step.
    """
    if not arrays:
        return 0
    turn, which = divmod(step, len(arrays))
    array = arrays[which]
    if not array.flags.c_contiguous or not array.nbytes:
        return 0
    data = array.reshape(-1).view(np.uint8)
    windows = -(-data.size // _WINDOW_BYTES)
    start = turn % windows * _WINDOW_BYTES
    return zlib.crc32(data[start : start + _WINDOW_BYTES].data)
