"""Sets how strict the limits are: full with QUIET=1, where nothing else runs; else they guard against regressions.

Other guests of a machine may slow down one side of a comparison more than the other. If a hypervisor moves two cores
apart, one core writes what the other has read nine times more slowly, for seconds at a time (1 MiB: 95 us, or 290).
Then the two sides' medians may come from different states, while the fastest tenth of both comes from the same state.
docs/performance.md has the limits and the measured figures.
"""

from __future__ import annotations

import os

__all__ = ["NOISE", "QUIET", "at_least", "at_most"]

QUIET = os.environ.get("QUIET") == "1"

NOISE = 1.05 if QUIET else 1.25
"""The ratio by which two medians of the same thing may differ."""

_GUARD = 1.0 if QUIET else 0.45
"""The part of a required ratio that must be reached. Source: runs in which two cores shared no cache from the first to
the last call; there 16 MiB of `group.empty()` was 0.99 to 1.28 times as fast as Open MPI, where 2 is required."""


def at_least(ratio: float) -> float:
    """Returns the lower limit for a measured ratio whose full requirement is at least `ratio`."""
    return ratio * _GUARD


def at_most(ratio: float) -> float:
    """Returns the upper limit for a measured ratio whose full requirement is at most `ratio`."""
    return ratio / _GUARD
