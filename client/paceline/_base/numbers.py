"""Whole numbers that users give as arguments."""

from __future__ import annotations

import operator
from typing import SupportsIndex, TypeGuard


def is_whole(value: object) -> TypeGuard[SupportsIndex]:
    """True for Python's and NumPy's whole numbers, but not for True and False."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def checked_whole(name: str, value: object, least: int) -> int:
    """Returns an argument as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below `least`.
    """
    if not is_whole(value):
        raise TypeError(f"{name} must be a whole number, not {value!r:.80}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number
