"""How strictly figures are held: in full with QUIET=1, where nothing else runs; else as guards against regressions.

Other guests of a machine slow down one side of a comparison more than the other. A hypervisor that moves two cores
apart makes what one has read nine times slower to write for the other, for seconds at a time (1 MiB: 95 us, or 290): a
median may be of one state for one side, and of the other for the other, while the fastest tenth is of one for both.
What is asked, and what was measured, is in docs/performance.md.
"""

from __future__ import annotations

import os

__all__ = ["NOISE", "QUIET", "at_least", "at_most"]

QUIET = os.environ.get("QUIET") == "1"

NOISE = 1.05 if QUIET else 1.25
"""Two medians of the same thing differ by so much."""

_GUARD = 1.0 if QUIET else 0.45
"""What must be left of a ratio. Source: runs in which two cores shared no cache from the first to the last call; there
16 MiB of `group.empty()` were 0.99 to 1.28 times as fast as Open MPI, of which 2 are asked."""


def at_least(ratio: float) -> float:
    """The least that a ratio that should be so high may be."""
    return ratio * _GUARD


def at_most(ratio: float) -> float:
    """The most that a ratio that should be so low may be."""
    return ratio / _GUARD
