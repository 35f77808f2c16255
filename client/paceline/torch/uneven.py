"""Ranks with fewer inputs than others: a rank without inputs takes part in reductions until all ranks have none."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Uneven"]


class Uneven:
    """Tracks which ranks still have inputs, by one small message before each reduction; inside of `join` only.

    Attributes:
        root: the lowest rank that took part in the last reduction with an input; 0 outside of `join`.
        reductions: number of reductions in this `join`.
    """

    def __init__(self, group: Any) -> None:
        self.root = 0
        self.reductions = 0
        self._group = group
        self._joining = False

    def open(self) -> None:
        """Allows different numbers of inputs on the ranks from now on; all ranks call this."""
        self._joining, self.root, self.reductions = True, 0, 0

    def close(self) -> None:
        """Ends that: all ranks have the same number of inputs again."""
        self._joining, self.root = False, 0

    def before_reduction(self) -> None:
        """Tells the other ranks that this rank takes part with an input."""
        if self._joining:
            self._tell(has_input=True)

    def others_go_on(self) -> bool:
        """Tells the other ranks that this rank has no input left; returns whether they will reduce again."""
        return self._tell(has_input=False)

    def _tell(self, *, has_input: bool) -> bool:
        table = np.zeros(self._group.size, np.int64)
        table[self._group.rank] = has_input
        active = np.flatnonzero(self._group.all_reduce(table, label="uneven"))
        if active.size:
            self.root = int(active[0])
            self.reductions += 1
        return bool(active.size)
