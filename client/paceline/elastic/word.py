"""The step word: the one small message by which all members of a view enter a step together. Pure.

It completes at a member only when every member has entered the step: so whoever applies a step knows that nobody is
behind, and when the next word completes, that everybody has applied it (I1). It carries what all must know alike:
requests, latched at entry; the step's number; and a digest of a part of the state, another one in each step, so that
members whose bits have drifted apart find out (I5).

It is reduced by adding up, in any float dtype and in any order, so that it can ride in a bucket of gradients: its
numbers are small whole ones, whose sums are exact. Of each flag, how many set it. Of the number and the digest, cut
into digits x of 4 bits, the sums of x and of x squared: over W members all x are equal exactly if W * sum(x x) is
sum(x) squared (Cauchy-Schwarz).
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["WORD_SIZE", "Flag", "agrees", "flags_of", "partial_digest", "word"]

_DIGITS = 3 + 8
"""Of 4 bits: 3 of the step's number, 8 of the digest. Their squares add up exactly in float32 for 70,000 members."""

_SHIFTS = range(0, 4 * _DIGITS, 4)

_FLAGS = 3

WORD_SIZE = _FLAGS + 2 * _DIGITS
"""Numbers in a word."""

_WINDOW_BYTES = 1 << 12
"""Bytes of state that go into one digest: few, for they come from memory in every step."""


class Flag(enum.IntFlag):
    """What a member asks of all."""

    JOIN = 1
    """Newcomers are ready: meet after this step."""
    LEAVE = 2
    """The member wants to go: meet after this step."""
    WRITES = 4
    """The member still writes its part of a checkpoint."""


def word(flags: Flag, step: int, digest: int) -> NDArray[np.float64]:
    """What one member puts in, shape [WORD_SIZE]: to be added up over all members."""
    asked, both = int(flags), (step & 0xFFF) | digest << 12  # 3 digits of the step, 8 of the digest
    digits = [both >> shift & 15 for shift in _SHIFTS]
    return np.array(
        [*(asked >> n & 1 for n in range(_FLAGS)), *digits, *[digit * digit for digit in digits]], np.float64
    )


def flags_of(sums: Sequence[float]) -> Flag:
    """What any member asked."""
    return Flag(sum((sums[n] > 0) << n for n in range(_FLAGS)))


def agrees(sums: Sequence[float], world: int) -> bool:
    """True if all members put the same step and digest in."""
    # Plain numbers: after a pass over a model nothing of NumPy is in the cache, and they are few.
    numbers = [round(number) for number in sums]
    plain, squared = numbers[_FLAGS : _FLAGS + _DIGITS], numbers[_FLAGS + _DIGITS :]
    return all(world * x_x == x * x for x, x_x in zip(plain, squared, strict=True))


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
    if not array.nbytes:
        return 0
    start = turn % -(-array.nbytes // _WINDOW_BYTES) * _WINDOW_BYTES
    if array.flags.c_contiguous:
        return zlib.crc32(array.reshape(-1).view(np.uint8)[start : start + _WINDOW_BYTES].data)
    first, count = start // array.itemsize, _WINDOW_BYTES // array.itemsize
    return zlib.crc32(np.asarray(array.flat[first : first + count]).view(np.uint8).data)  # in C order too
