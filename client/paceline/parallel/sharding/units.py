"""All units of one model in a pass: fetches ahead, lets go behind, and sends gradients on their way as backward goes.

At any moment of a pass the units that run are whole, and the next `ahead` ones are on their way or whole; everything
else is this rank's part alone. Every rank issues the same collectives in the same order, because that order follows
from the order in which units run, and from nothing that only one rank knows.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from paceline.errors import StepOrderError
from paceline.parallel.parameter import Parameter
from paceline.parallel.ranks import Ranks
from paceline.parallel.sharding.order import Order
from paceline.parallel.sharding.reduction import Reduction
from paceline.parallel.sharding.unit import Unit

__all__ = ["Units"]


class Units:
    """The units of a model; a `GradientReducer`.

    Args:
        units: as they run forward, as far as is known.
        paths: of every piece, by its identity.
        group: all ranks.
        ahead: units to gather before they run.
    """

    def __init__(self, units: Sequence[Unit], paths: Mapping[int, str], group: Ranks, ahead: int) -> None:
        self._all = tuple(units)
        self._ahead = ahead
        self._forward = Order([n for n, unit in enumerate(self._all) if unit.flats])
        self._backward = Order(_backward_guess(self._all))
        self._number = {id(unit): n for n, unit in enumerate(self._all)}
        self._pairs = [(paths[id(piece)], p, piece) for unit in self._all for p, piece in unit.pairs()]
        self._group = group
        self._reduction = Reduction(self._all, group)
        self._order: Order | None = None
        """The order of the running pass; None between passes."""
        self._backwards = self._ignores = self._early = False
        self.prefetched = False
        """True after `prefetch`, until the next pass or known change of the parts."""
        self._fetched = False
        """True after `prefetch`, until the next pass; the same on all ranks."""
        self.refit()

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._all)

    def fits(self) -> bool:
        """False once a parameter was frozen or unfrozen, in the module or through its piece."""
        return all(unit.fits() for unit in self._all)

    def refit(self) -> None:
        """Notes that the ranks have agreed on which parameters are frozen."""
        for unit in self._all:
            unit.refit()
        trained = [(path, p, piece) for path, p, piece in self._pairs if piece.requires_grad]
        self.parameters: Mapping[str, Parameter] = {path: piece for path, _, piece in trained}
        self.sources: Mapping[str, Parameter] = {path: p for path, p, _ in trained}

    @contextmanager
    def running_forward(self, unit: Unit) -> Iterator[None]:
        """Keeps a unit whole for its forward inside the block. A module's backward may call it again."""
        with self._whole(unit):
            yield
        if not self._backwards:
            unit.runs += 1

    @contextmanager
    def running_backward(self, unit: Unit) -> Iterator[None]:
        """Keeps a unit whole for its backward inside the block, and sends its gradients afterwards."""
        self._reduction.make_room()
        with self._whole(unit), unit.taking_gradients(ignore=self._ignores):
            yield
        unit.left -= 1
        if self._early and unit.left <= 0:
            self._reduction.send(unit)

    @contextmanager
    def _whole(self, unit: Unit) -> Iterator[None]:
        if self._order is None:
            raise StepOrderError("this FSDP wraps a part of a model that is wrapped as a whole: call that one")
        if unit.flats:
            coming = self._order.enter(self._number[id(unit)], self._ahead)
            unit.wait()
            for number in coming:
                self._all[number].fetch()
        unit.inside += 1
        try:
            yield
        finally:
            unit.inside -= 1
            if not unit.inside:
                unit.release()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Runs a forward pass of the whole model inside the block."""
        for unit in self._all:
            unit.runs = 0
            if unit.placement.keeps_full:
                unit.expire()  # parts may have been changed in place on any rank
        with self._passing(self._forward):
            yield

    @contextmanager
    def watching(self, *, weight: float, early: bool) -> Iterator[None]:
        """Runs a backward pass of the whole model inside the block.

        Args:
            weight: this rank's weight, including that of earlier micro-batches.
            early: whether units send their gradients as soon as they are done.
        """
        self._check_not_summoned()
        if early:
            self._reduction.announce(weight)
        self._backwards, self._early = True, early
        for unit in self._all:
            unit.left = unit.runs
        try:
            with self._passing(self._backward):
                yield
        finally:
            self._backwards = self._early = False

    @contextmanager
    def ignoring(self, *, weight: float, early: bool) -> Iterator[None]:
        """Like `watching`, but drops the gradients; calls the same collectives as ranks that keep them."""
        self._ignores = True
        try:
            with self.watching(weight=weight, early=early):
                yield
        finally:
            self._ignores = False

    @contextmanager
    def _passing(self, order: Order) -> Iterator[None]:
        try:
            self._refresh()
            self._order = order
            order.start()
            yield
            order.end()
        finally:
            self._order = None
            self.prefetched = self._fetched = False
            for unit in self._all:  # units that were fetched and not used
                unit.drop()

    def prefetch(self) -> None:
        """Starts to gather the units that the next forward pass begins with."""
        self.prefetched = self._fetched = True
        for number in self._forward.first(max(1, self._ahead)):
            if not self._all[number].placement.keeps_full:  # it may be written while it is sent
                self._all[number].fetch()

    def expire(self) -> None:
        """Drops whole arrays and running gathers, which are out of date because parts have changed."""
        self.prefetched = False
        for unit in self._all:
            unit.expire()

    def _refresh(self) -> None:
        """Gathers prefetched units again if any rank has changed its part since; the ranks agree on that."""
        if self._fetched and self._group.size > 1:
            changed = not self.prefetched or any(flat.was_changed() for unit in self._all for flat in unit.flats)
            if self._group.all_reduce(np.array([changed], np.int64))[0]:
                self.expire()

    @contextmanager
    def summoned(self) -> Iterator[None]:
        """Makes every parameter whole and exact inside the block; changes of values there are kept."""
        if self.are_summoned:
            yield
            return
        flats = [(unit, flat) for unit in self._all for flat in unit.flats]
        self.expire()
        try:
            for unit, flat in flats:
                flat.summon(unit.shards)
            yield
        finally:
            self.prefetched = False
            for _, flat in flats:
                flat.dismiss()

    @property
    def are_summoned(self) -> bool:
        """True inside `summoned`."""
        return any(flat.is_summoned for unit in self._all for flat in unit.flats)

    def finish(self, *, weight: float) -> None:
        """Sends the remaining gradients, waits for all, and leaves the weighted means in the pieces.

        A parameter that no rank used gets no gradient.

        Raises:
            StepOrderError: the weights of all ranks add up to 0, a gradient came after its unit had sent, or this is
                inside `summoned`.
            PacelineError: a collective failed.
        """
        self._check_not_summoned()
        orders = (self._forward, self._backward)
        everywhere = self._reduction.finish(weight, [order.is_complete for order in orders])
        for order, complete in zip(orders, everywhere, strict=True):
            if complete:
                order.commit()
        self.expire()

    def give_up(self) -> None:
        """Drops all gradients, and abandons running collectives, since other ranks may never send their part."""
        self._reduction.give_up()
        for unit in self._all:
            unit.drop()

    def _check_not_summoned(self) -> None:
        if self.are_summoned:
            raise StepOrderError("gradients inside unshard(): an update would not change the whole parameters there")


def _backward_guess(units: Sequence[Unit]) -> list[int]:
    """The expected order of units in backward: the outermost first, then the others from last to first."""
    numbers = [n for n, unit in enumerate(units) if unit.flats]
    outermost = [n for n in numbers if n == 0]
    return outermost + [n for n in reversed(numbers) if n != 0]
