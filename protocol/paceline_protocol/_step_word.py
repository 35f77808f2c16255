"""The step word: one small message with which all members of a view enter a step together.

It completes at a member only when every member has entered the step. So a member that applies a step knows that all
others have entered it, and when the next word completes, that all have applied it (I1). The word carries what all
members must agree on: requests, fixed when the step begins; the step's number; and a digest of a part of the
state, a different part in each step, so that members whose bits differ are detected (I5).

The word is summed, in any float dtype and in any order, so that a bucket of gradients can carry it: its numbers are
small integers, whose sums are exact. For each flag it has the number of members that set it. The step's number and the
digest are cut into digits x of 4 bits, and the word has the sums of x and of x squared: over W members all x are equal
if and only if W * sum(x x) = sum(x) squared (Cauchy-Schwarz).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

_DIGITS = 3 + 8
"""Digits of 4 bits: 3 of the step, 8 of the digest. Sums of their squares are exact in float32 for 70,000 members."""

_SHIFTS = range(0, 4 * _DIGITS, 4)

_FLAGS = 4

STEP_WORD_SIZE = _FLAGS + 2 * _DIGITS
"""Numbers in a word."""


class StepFlag(enum.IntFlag):
    """A request of one member to all members."""

    JOIN = 1
    """Newcomers are ready: meet after this step."""
    LEAVE = 2
    """The member wants to leave: meet after this step."""
    WRITES = 4
    """The member still writes its part of a checkpoint."""
    STOP = 8
    """The loop ends after this step, on all members."""


def step_word(flags: StepFlag, step: int, digest: int) -> list[float]:
    """One member's word: `STEP_WORD_SIZE` numbers. The words of all members are summed, number by number."""
    asked, both = int(flags), (step & 0xFFF) | digest << 12  # 3 digits of the step, 8 of the digest
    digits = [both >> shift & 15 for shift in _SHIFTS]
    return [*(asked >> n & 1 for n in range(_FLAGS)), *digits, *[digit * digit for digit in digits]]


def flags_of(sums: Sequence[float]) -> StepFlag:
    """The flags that at least one member has set."""
    return StepFlag(sum((sums[n] > 0) << n for n in range(_FLAGS)))


def members_with(flag: StepFlag, sums: Sequence[float]) -> int:
    """The number of members that have set a flag."""
    return round(sums[flag.value.bit_length() - 1])


def agrees(sums: Sequence[float], world: int) -> bool:
    """True if the words of all members had the same step and digest."""
    # Python numbers: they are few, and after a pass over a model NumPy's code is not in the cache.
    numbers = [round(number) for number in sums]
    plain, squared = numbers[_FLAGS : _FLAGS + _DIGITS], numbers[_FLAGS + _DIGITS :]
    return all(world * x_x == x * x for x, x_x in zip(plain, squared, strict=True))
