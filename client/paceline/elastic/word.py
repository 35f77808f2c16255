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

WORD_SIZE = 2 + 2 * _DIGITS
"""Numbers in a word."""

_WINDOW_BYTES = 1 << 14
"""Bytes of state that go into one digest: 5 us of CRC-32."""


class Flag(enum.IntFlag):
    """What a member asks of all."""

    JOIN = 1
    """Newcomers are ready: meet after this step."""
    LEAVE = 2
    """The member wants to go: meet after this step."""


def word(flags: Flag, step: int, digest: int) -> NDArray[np.float64]:
    """What one member puts in, shape [WORD_SIZE]: to be added up over all members."""
    digits = [(number >> shift) & 15 for number, top in ((step, 12), (digest, 32)) for shift in range(0, top, 4)]
    asked = [float(Flag.JOIN in flags), float(Flag.LEAVE in flags)]
    return np.array([*asked, *digits, *(digit * digit for digit in digits)], np.float64)


def flags_of(sums: NDArray[Any]) -> Flag:
    """What any member asked."""
    return (Flag.JOIN if sums[0] else Flag(0)) | (Flag.LEAVE if sums[1] else Flag(0))


def agrees(sums: NDArray[Any], world: int) -> bool:
    """True if all members put the same step and digest in."""
    numbers = np.rint(np.asarray(sums, np.float64)).astype(np.int64)
    plain, squared = numbers[2 : 2 + _DIGITS], numbers[2 + _DIGITS :]
    return bool(np.array_equal(world * squared, plain * plain))


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
    count = _WINDOW_BYTES // array.itemsize
    start = turn % -(-array.size // count) * count
    values = array.reshape(-1) if array.flags.c_contiguous else array.flat  # in either case in C order
    return zlib.crc32(np.asarray(values[start : start + count]).view(np.uint8).data)
