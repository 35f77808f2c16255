"""All gradients of one backward pass on their way, and the total weight that makes means of the sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.errors import StepOrderError
from paceline.parallel.ranks import PendingWork, Ranks
from paceline.parallel.sharding.scattering import Scattering
from paceline.parallel.sharding.unit import Unit

__all__ = ["MAX_SCATTERING", "Reduction"]

MAX_SCATTERING = 2
"""Flat arrays whose whole gradients may be on their way at once: more would be memory that sharding is to save."""


class Reduction:
    """The gradients of a model's units.

    Args:
        units: all of them, in the order in which what is left over is sent.
        group: all ranks.
    """

    def __init__(self, units: Sequence[Unit], group: Ranks) -> None:
        self._flats = [(unit, flat) for unit in units for flat in unit.flats]
        self._group = group
        self._going: deque[Scattering] = deque()
        self._announced: PendingWork | None = None

    def announce(self, weight: float) -> None:
        """The weight of this pass, before its first gradients: who adds a part up can divide it in the same go."""
        if self._group.size > 1:
            table = np.array([weight], np.float64)
            self._announced = self._group.all_reduce(table, out=table, async_op=True)

    def send(self, unit: Unit) -> None:
        """Sends a unit's gradients; no more may come."""
        announced = self._announced
        divisor = None if announced is None else lambda: float(announced.wait()[0])
        self._going.extend(Scattering(unit, flat, divisor) for flat in unit.flats if flat.gradients.are_wanted)

    def make_room(self) -> None:
        """Before a unit's gradients take memory: those of all but the last units must have left.

        Second legs begin here, whether their first ends early or late: at the same point of the program on all ranks,
        so that an error leaves none of them a leg ahead.
        """
        for scattering in list(self._going)[: len(self._going) - MAX_SCATTERING + 1]:
            scattering.advance()

    def finish(self, weight: float, facts: Sequence[bool]) -> list[bool]:
        """Sends what is left, waits for all, and leaves the weighted means in the pieces.

        Args:
            weight: of this rank.
            facts: what else the ranks are to agree on; as many on each.

        Returns:
            For each fact, whether it holds on all ranks.

        Raises:
            StepOrderError: the weights of all ranks add up to 0, or a gradient came after its unit had sent.
            PacelineError: a collective failed.
        """
        for scattering in self._going:
            if (path := scattering.flat.path_with_gradient()) is not None:
                raise StepOrderError(f"parameter {path!r} got a gradient after its unit's backward pass had ended")
        total, used, everywhere = self._totals(weight, facts)
        if not total > 0:
            raise StepOrderError("the weights of all ranks add up to 0: there is no sample to take the mean over")
        self._announced = None
        sent = {id(scattering.flat) for scattering in self._going}
        for unit, flat in self._flats:
            if id(flat) not in sent and used[id(flat)].any():
                self._going.append(Scattering(unit, flat))
        for scattering in self._going:
            scattering.advance()
        while self._going:
            scattering = self._going.popleft()
            scattering.finish(total, used[id(scattering.flat)])
        return everywhere

    def give_up(self) -> None:
        """Drops all gradients, and what is under way."""
        self._going.clear()
        self._announced = None
        for _, flat in self._flats:
            flat.gradients.drop()
            for piece in flat.pieces:
                piece._hold(None)

    def _totals(self, weight: float, facts: Sequence[bool]) -> tuple[float, dict[int, NDArray[np.bool_]], list[bool]]:
        """Weight of all ranks; by flat array's identity whether any rank used each parameter; facts true on all."""
        sent: dict[int, Scattering] = {id(scattering.flat): scattering for scattering in self._going}
        flags = [sent[id(flat)].used if id(flat) in sent else flat.gradients.used_flags() for _, flat in self._flats]
        table = np.array([weight, *facts, *(flag for of_flat in flags for flag in of_flat)], np.float64)
        if self._group.size > 1:
            self._group.all_reduce(table, out=table)
        start = 1 + len(facts)
        everywhere = [bool(count == self._group.size) for count in table[1:start]]
        used = {}
        for (_, flat), of_flat in zip(self._flats, flags, strict=True):
            used[id(flat)] = table[start : start + len(of_flat)] > 0
            start += len(of_flat)
        return float(table[0]), used, everywhere
