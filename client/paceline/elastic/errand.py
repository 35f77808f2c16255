"""Sends a step word: in a bucket of gradients if there is one, else in its own message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import StepOrderError
from paceline.group import Group
from paceline.work import Work

__all__ = ["Errand"]


class Errand:
    """One member's step word while it is being summed over the members.

    Args:
        group: the view.
        values: the word.
        step: number of its step.
        rides: whether it waits for a bucket of gradients; the same on all ranks. Otherwise it is sent at once, in the
            background of what the step computes.

    Raises:
        PacelineError: the generation has failed.
    """

    def __init__(self, group: Group, values: NDArray[np.float64], step: int, *, rides: bool) -> None:
        self.values = values
        self._group = group
        self._label = f"step-{step}"
        self._sums: Sequence[float] | None = None
        self._work: Work[NDArray[Any]] | None = None
        if rides:
            group.mesh.fault.check()
            group.add_piggyback(self)
        else:
            self._work = group.all_reduce(values, label=self._label, async_op=True)

    def arrive(self, sums: NDArray[Any]) -> None:
        """See `Piggyback.arrive`."""
        self._sums = sums.tolist()

    def wait(self) -> Sequence[float]:
        """The sums over all members, once all have entered the step.

        Raises:
            StepOrderError: it was to be sent with gradients that were dropped.
            PacelineError: the generation has failed.
        """
        if self._work is not None:
            return self._work.wait().tolist()  # type: ignore[no-any-return]
        if self._sums is None and self._group.cancel_piggyback(self):  # there were no gradients in this step
            self._sums = self._group.all_reduce(self.values, label=self._label).tolist()
        if self._sums is None:
            self._group.mesh.fault.check()
            raise StepOrderError("the gradients of this step were dropped, and its step word with them")
        return self._sums

    def drop(self) -> None:
        """Withdraws the word from the gradients if it was not sent, because the step is over."""
        self._group.cancel_piggyback(self)
