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
        """Of the pass that runs; None between passes."""
        self._backwards = self._ignores = self._early = False
        self.prefetched = False
        """`prefetch` was called, and no pass or known change of parts has come since."""
        self._fetched = False
        """`prefetch` was called, and no pass has come since: known to all ranks alike."""
        self.refit()

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._all)

    def fits(self) -> bool:
        """False once a parameter was frozen or unfrozen, in the module or through its piece."""
        return all(unit.fits() for unit in self._all)

    def refit(self) -> None:
        """What is frozen and what is not has been agreed on."""
        for unit in self._all:
            unit.refit()
        trained = [(path, p, piece) for path, p, piece in self._pairs if piece.requires_grad]
        self.parameters: Mapping[str, Parameter] = {path: piece for path, _, piece in trained}
        self.sources: Mapping[str, Parameter] = {path: p for path, p, _ in trained}

    @contextmanager
    def running_forward(self, unit: Unit) -> Iterator[None]:
        """For a unit's forward inside the block: it is whole there. A module's backward may call it again."""
        with self._whole(unit):
            yield
        if not self._backwards:
            unit.runs += 1

    @contextmanager
    def running_backward(self, unit: Unit) -> Iterator[None]:
        """For a unit's backward inside the block: it is whole there, and sends its gradients afterwards."""
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
        """For a forward pass of the whole model inside the block."""
        for unit in self._all:
            unit.runs = 0
            if unit.placement.keeps_full:
                unit.expire()  # parts may have been changed in place on any rank
        with self._passing(self._forward):
            yield

    @contextmanager
    def watching(self, *, weight: float, early: bool) -> Iterator[None]:
        """For a backward pass of the whole model inside the block.

        Args:
            weight: this rank's, that of earlier micro-batches included.
            early: units send gradients when they are done.
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
        """As `watching`; the gradients are dropped, but collectives go as on the ranks where they count."""
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
            for unit in self._all:  # what was fetched for nothing
                unit.drop()

    def prefetch(self) -> None:
        """Starts to gather the units that the next forward pass begins with."""
        self.prefetched = self._fetched = True
        for number in self._forward.first(max(1, self._ahead)):
            if not self._all[number].placement.keeps_full:  # that one would travel while it may be written
                self._all[number].fetch()

    def expire(self) -> None:
        """Parts have changed: what is whole, or on its way, is out of date."""
        self.prefetched = False
        for unit in self._all:
            unit.expire()

    def _refresh(self) -> None:
        """Gathers anew what was prefetched, if any rank has changed its part since: all ranks must know."""
        if self._fetched and self._group.size > 1:
            changed = not self.prefetched or any(flat.was_changed() for unit in self._all for flat in unit.flats)
            if self._group.all_reduce(np.array([changed], np.int64))[0]:
                self.expire()

    @contextmanager
    def summoned(self) -> Iterator[None]:
        """Every parameter is whole and exact inside the block; what is changed there is kept."""
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
        """Sends the gradients that are still here, waits for all, and leaves the weighted means in the pieces.

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
        """Drops all gradients, and what is under way: it does not wait for what others may never send."""
        self._reduction.give_up()
        for unit in self._all:
            unit.drop()

    def _check_not_summoned(self) -> None:
        if self.are_summoned:
            raise StepOrderError("gradients inside unshard(): an update would not reach what is whole there")


def _backward_guess(units: Sequence[Unit]) -> list[int]:
    """The last unit to be built runs first, but the one around all of them, which is the first, enters before it."""
    numbers = [n for n, unit in enumerate(units) if unit.flats]
    outermost = [n for n in numbers if n == 0]
    return outermost + [n for n in reversed(numbers) if n != 0]
