"""Gradients of one flat array on their way: summed over all ranks, each rank getting the part that it keeps.

In two legs where there are replicas: to the rank of the node that keeps the part, then summed over the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.parallel.ranks import PendingWork
from paceline.parallel.sharding.flat import Flat
from paceline.parallel.sharding.unit import Unit

__all__ = ["Scattering"]


class Scattering:
    """Begins with the first leg. All ranks make these in the same order, and begin second legs in that order.

    Args:
        unit: whose gradients; they are gone from the parameters from now on.
        flat: which of its arrays.
        divisor: gives the total weight while they are added up; None if it is known at the end only.

    Attributes:
        flat: as above.
        used: for each parameter, whether it had a gradient here.
    """

    def __init__(self, unit: Unit, flat: Flat, divisor: Callable[[], float] | None = None) -> None:
        self.flat = flat
        self.used = flat.gradients.used_flags()
        self._replicas = unit.replicas
        ranks = unit.replicas if unit.shards is None else unit.shards
        gradients = flat.gradients.take()
        sent = gradients
        if flat.wire is not None and ranks is not None:
            sent = ranks.empty(gradients.size, flat.wire)
            sent[...] = gradients
        # What travels in fewer bits is divided afterwards, with all of its own.
        self._divisor = divisor if sent is gradients and ranks is not None else None
        # In rank order 16-bit values are added up in float32, and rounded once.
        self._order = "fastest" if sent is gradients else "rank"
        self._part: NDArray[Any] | None = None
        self._first: PendingWork | None = None
        self._second: PendingWork | None = None
        if unit.shards is not None and flat.is_spread:
            # The second leg sends what the first one leaves: from where links can read it.
            part = None if unit.replicas is None else unit.replicas.empty(flat.layout.part, sent.dtype)
            self._first = unit.shards.reduce_scatter(
                sent,
                op="sum",
                order=self._order,
                out=part,
                label=flat.label,
                divisor=self._divisor if unit.replicas is None else None,
                async_op=True,
            )
        else:
            self._part = sent
            self._begin_second()

    def advance(self) -> None:
        """Waits for the end of the first leg, and begins the second; does nothing if that has begun."""
        if self._first is not None:
            self._part, self._first = self._first.wait(), None
            self._begin_second()

    def finish(self, total: float, used: NDArray[np.bool_]) -> None:
        """Waits, divides by the total weight, and gives the pieces their gradients.

        Args:
            total: sum of the weights of all ranks, above 0.
            used: for each parameter, whether any rank used it.
        """
        self.advance()
        if self._second is not None:
            self._second.wait()
        assert self._part is not None
        part = self._part.astype(self.flat.dtype, copy=False)
        if self._divisor is None and total != 1:  # a division by 1 changes no bit
            np.divide(part, total, out=part)
        self.flat.put_gradients(part, used)

    def _begin_second(self) -> None:
        if self._replicas is not None:
            self._second = self._replicas.all_reduce(
                self._part,
                op="sum",
                order=self._order,
                out=self._part,
                label=self.flat.label,
                divisor=self._divisor,
                async_op=True,
            )
