"""Ranks with fewer inputs than others: those that are through take part in the others' reductions until all are."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Uneven"]


class Uneven:
    """Who still has inputs. One small message before each reduction, inside of `join` only.

    Attributes:
        root: the lowest rank that took part in the last reduction with an input; 0 outside of `join`.
        reductions: how many there were in this `join`.
    """

    def __init__(self, group: Any) -> None:
        self.root = 0
        self.reductions = 0
        self._group = group
        self._joining = False

    def open(self) -> None:
        """Ranks may have unlike numbers of inputs from now on; all ranks call this."""
        self._joining, self.root, self.reductions = True, 0, 0

    def close(self) -> None:
        """They have like numbers again."""
        self._joining, self.root = False, 0

    def before_reduction(self) -> None:
        """This rank has had an input."""
        if self._joining:
            self._tell(has_input=True)

    def others_go_on(self) -> bool:
        """This rank has none left; whether the others will reduce once more."""
        return self._tell(has_input=False)

    def _tell(self, *, has_input: bool) -> bool:
        table = np.zeros(self._group.size, np.int64)
        table[self._group.rank] = has_input
        active = np.flatnonzero(self._group.all_reduce(table, label="uneven"))
        if active.size:
            self.root = int(active[0])
            self.reductions += 1
        return bool(active.size)
