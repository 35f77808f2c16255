"""Which cores a worker runs on: its share, where there is a core for each. Pure, but for asking what there is."""

from __future__ import annotations

import os
from collections.abc import Collection

__all__ = ["allowed_cores", "share_of_cores"]


def share_of_cores(index: int, workers: int, cores: Collection[int]) -> set[int] | None:
    """The cores for one of a launcher's workers; None for all of them, where workers outnumber cores or are alone.

    A neighbour's wake-up would else be run on the core that has woken it, where it waits for its turn: a small
    collective takes several times longer then.

    Args:
        index: of the worker, from 0.
        workers: how many share the cores.
        cores: those that there are.
    """
    if workers < 2 or workers > len(cores):
        return None
    ordered = sorted(cores)
    return set(ordered[index * len(ordered) // workers : (index + 1) * len(ordered) // workers])


def allowed_cores() -> set[int]:
    """The cores that this process may use; none known where the system does not tell."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
