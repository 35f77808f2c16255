"""Fewer parametrisations than the full product, where each value matters but not each with each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["by_turns"]


def by_turns(cases: Iterable[tuple[Any, ...]], ways: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each case once, with one of the ways by turns, which begin one further in each round.

    Args:
        cases: tuples of arguments.
        ways: tuples of further arguments.
    """
    count = len(ways)
    return [(*case, *ways[(number + number // count) % count]) for number, case in enumerate(cases)]
