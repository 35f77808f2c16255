"""Runs a model's units in a pass: gathers units ahead, frees them afterwards, reduces gradients during backward.

During a pass the running units are whole, and the next `ahead` units are whole or being gathered; of all other units
this rank has only its shard. Every rank issues the same collectives in the same order, because that order depends only
on the order in which units run, not on anything that a single rank knows.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, section 3.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._base.sum_order import EVEN, Node, SumOrder
from paceline._base.work import Work
from paceline._group import Group
from paceline._group.call_options import Order
from paceline._parallel._parameter import Parameter
from paceline._parallel._transport import NO_FIXED_ORDER
from paceline._parallel.sharding._flat import Flat
from paceline._parallel.sharding._tree_sums import TreeScattering, TreeSums, check_placement
from paceline._parallel.sharding._unit import Unit
from paceline.errors import StepOrderError, UnsupportedOp


class UnitOrder:
    """Learns from pass to pass in which order units run, so that the next ones can be gathered ahead. Pure.

    All ranks run the same program, so they see the same order. They make it their next guess only when all know that
    all have completed the pass (`commit`), so that a rank whose pass failed guesses the same as the others. If a guess
    is wrong, nothing is gathered ahead.
    """

    def __init__(self, guess: Sequence[int]) -> None:
        self._guess = list(guess)
        self._seen: list[int] = []
        self.is_complete = False
        """True if the last pass was completed, and its order has not become the guess yet."""

    def start(self) -> None:
        """Begins a pass."""
        self._seen = []
        self.is_complete = False

    def enter(self, unit: int, count: int) -> list[int]:
        """Records that a unit begins to run; returns the next units that are known, at most `count`."""
        self._seen.append(unit)
        here = len(self._seen)
        return self._guess[here : here + count] if self._guess[here - 1 : here] == [unit] else []

    def first(self, count: int) -> list[int]:
        """Returns the units that the next pass is expected to begin with, at most `count`."""
        return self._guess[:count]

    def end(self) -> None:
        """Ends a complete pass."""
        self.is_complete = True

    def commit(self) -> None:
        """Makes the last pass, which all ranks have completed, the next guess."""
        self._guess = list(self._seen)
        self.is_complete = False


class Scattering:
    """Sums the gradients of one flat array over all ranks; each rank gets the shard that it keeps.

    With replicas this takes two collectives: a reduce_scatter inside the node, and an all_reduce of each shard over the
    nodes. The first begins at once. All ranks make `Scattering`s, and begin their second collectives, in one order.
    `divisor` returns the total weight while gradients are summed; None if it is known only at the end. `used` says for
    each parameter whether it had a gradient on this rank.
    """

    def __init__(self, unit: Unit, flat: Flat, divisor: Callable[[], float] | None = None) -> None:
        self.flat = flat
        self.used = flat.gradients.used_flags()
        self._replicas = unit.replicas
        ranks = unit.replicas if unit.shards is None else unit.shards
        gradients = flat.gradients.take()
        self._divisor: Callable[[], float] | None = None
        self._shard: NDArray[Any] | None = None
        self._first: Work[Any] | None = None
        self._second: Work[Any] | None = None
        if flat.transport is not None:
            empty = np.empty if unit.replicas is None else unit.replicas.empty  # links send it in the second collective
            self._first = flat.transport.scatter(gradients, flat.travels_in, empty, flat.label)
            return
        sent = gradients
        if flat.wire is not None and ranks is not None:
            sent = ranks.empty(gradients.size, flat.wire)
            sent[...] = gradients
        # Values that travel in fewer bits are divided afterwards, in full precision.
        self._divisor = divisor if sent is gradients and ranks is not None else None
        if unit.shards is not None and flat.is_spread:
            # The second collective sends the result of the first, which must lie in memory that links can read.
            out = None if unit.replicas is None else unit.replicas.empty(flat.layout.shard_size, sent.dtype)
            self._first = unit.shards.reduce_scatter(
                sent,
                op="sum",
                order=self._order_of(sent),
                out=out,
                label=flat.label,
                divisor=self._divisor if unit.replicas is None else None,
                async_op=True,
            )
        else:
            self._shard = sent
            self._begin_second()

    def advance(self) -> None:
        """Waits for the end of the first collective, and begins the second; does nothing if the second has begun."""
        if self._first is not None:
            self._shard, self._first = self._first.wait(), None
            self._begin_second()

    def finish(self, total: float, used: NDArray[np.bool_]) -> None:
        """Waits for both collectives, divides by the weight, and gives pieces that any rank used their gradients."""
        self.advance()
        if self._second is not None:
            self._second.wait()
        assert self._shard is not None
        shard = self._shard.astype(self.flat.dtype, copy=False)
        if self._divisor is None and total != 1:  # a division by 1 changes no bit
            np.divide(shard, total, out=shard)
        self.flat.put_gradients(shard, used)

    def _begin_second(self) -> None:
        if self._replicas is not None:
            assert self._shard is not None
            self._second = self._replicas.all_reduce(
                self._shard,
                op="sum",
                order=self._order_of(self._shard),
                out=self._shard,
                label=self.flat.label,
                divisor=self._divisor,
                async_op=True,
            )

    def _order_of(self, sent: NDArray[Any]) -> Order:
        """Returns "rank" for values in fewer bits, which are then summed in float32 and rounded once."""
        return "fastest" if sent.dtype == self.flat.dtype else "rank"


MAX_SCATTERING = 2
"""Flat arrays whose whole gradients may travel at the same time: more would take the memory that sharding saves."""


class UnitReduction:
    """The reduction of all gradients of one backward pass, and the total weight by which the sums are divided.

    The units are in the order in which remaining gradients are sent at the end.
    """

    def __init__(self, units: Sequence[Unit], group: Group) -> None:
        self._flats = [(unit, flat) for unit in units for flat in unit.flats]
        self._group = group
        self._going: deque[Scattering | TreeScattering] = deque()
        self._announced: Any = None
        self._order = EVEN
        """The order in which gradients are reduced, or set aside."""
        self._weights = TreeSums(0)
        self._sums: dict[int, TreeSums] = {}
        """Sums of gradients of finished leaves, by the identity of the flat array."""
        self._used: dict[int, list[bool]] = {}
        """For each parameter, whether it had a gradient in a finished leaf, by the identity of the flat array."""

    def begin_pass(self, order: SumOrder) -> None:
        """Prepares for the gradients of a pass."""
        if self._order.leaves and order.is_first:
            self._drop_leaves()
        self._order = order
        if order.leaves and order.is_first:
            self._weights = TreeSums(order.leaves)
            self._sums = {id(flat): TreeSums(order.leaves) for _, flat in self._flats}

    def set_aside(self, weight: float) -> None:
        """Adds the gradients of a finished leaf, and its weight, to the sums of the leaves before it."""
        self._add_weight(weight)
        for _, flat in self._flats:
            if flat.gradients.are_wanted:
                self._add_gradients(flat)

    def announce(self, weight: float) -> None:
        """Sums the weights of all ranks before the gradients, so that these can be divided while they are summed."""
        if leaves := self._order.leaves:
            self._add_weight(weight)
            terms, nodes = self._weights.terms, self._order.nodes
            if self._group.size > 1:
                self._announced = self._group._core.all_reduce_tree(
                    terms, leaves=leaves, nodes=nodes, out=terms[-1], async_op=True
                )
        elif self._group.size > 1:
            table = np.array([weight], np.float64)
            self._announced = self._group.all_reduce(table, out=table, async_op=True)

    def send(self, unit: Unit) -> None:
        """Sends a unit's complete gradients."""
        announced = self._announced
        divisor = None if announced is None else lambda: float(announced.wait()[0])
        self._going.extend(self._scattering(unit, flat, divisor) for flat in unit.flats if flat.gradients.are_wanted)

    def _scattering(
        self, unit: Unit, flat: Flat, divisor: Callable[[], float] | None = None
    ) -> Scattering | TreeScattering:
        if not (leaves := self._order.leaves):
            return Scattering(unit, flat, divisor)
        self._add_gradients(flat)
        terms, used = self._sums[id(flat)].terms, self._used[id(flat)]
        return TreeScattering(unit, flat, terms, used, leaves, self._order.nodes, self._total_of_leaves)

    def _add_gradients(self, flat: Flat) -> None:
        flags = flat.gradients.used_flags()
        before = self._used.get(id(flat), flags)
        self._used[id(flat)] = [now or then for now, then in zip(flags, before, strict=True)]
        flat.gradients.reuse(self._sums[id(flat)].add(self._leaf, flat.gradients.take()))

    def _add_weight(self, weight: float) -> None:
        # As DDP does, in the dtype of the gradients.
        dtype = next((flat.dtype for _, flat in self._flats if flat.gradients.are_wanted), np.dtype(np.float64))
        self._weights.add(self._leaf, np.array([weight], dtype))

    @property
    def _leaf(self) -> Node:
        assert self._order.leaf is not None, "no leaf is computed"
        return self._order.leaf

    def _total_of_leaves(self) -> float:
        """Returns the total weight of all leaves, once it is known."""
        return float((self._weights.terms[0] if self._announced is None else self._announced.wait())[0])

    def _drop_leaves(self) -> None:
        """Forgets the sums of finished leaves."""
        self._order = EVEN
        self._sums.clear()
        self._used.clear()
        for _, flat in self._flats:
            flat.gradients.free()

    def make_room(self) -> None:
        """Waits, before a unit's gradients take memory, until all but the last units' have been sent.

        Second collectives begin here, even if the first ended long before: this is the same point of the program on all
        ranks, so that after an error no rank is a collective ahead.
        """
        for scattering in list(self._going)[: len(self._going) - MAX_SCATTERING + 1]:
            scattering.advance()

    def finish(self, weight: float, facts: Sequence[bool]) -> list[bool]:
        """Sends what is left, waits for all, and leaves the weighted means in the pieces.

        Returns for each of the facts, as many on each rank, whether it holds on all ranks.

        Raises:
            StepOrderError: the weights of all ranks add up to 0, or a gradient came after its unit's were sent.
        """
        for scattering in self._going:
            if (path := scattering.flat.path_with_gradient()) is not None:
                raise StepOrderError(f"parameter {path!r} got a gradient after its unit's backward pass had ended")
        total, used, everywhere = self._totals(weight, facts)
        if self._order.leaves:
            total = self._total_of_leaves()
        if not total > 0:
            raise StepOrderError("the weights of all ranks add up to 0, so there are no samples to average")
        sent = {id(scattering.flat) for scattering in self._going}
        for unit, flat in self._flats:
            if id(flat) not in sent and used[id(flat)].any():
                self._going.append(self._scattering(unit, flat))
        for scattering in self._going:
            scattering.advance()
        while self._going:
            scattering = self._going.popleft()
            scattering.finish(total, used[id(scattering.flat)])
        self._announced = None
        if self._order.leaves:
            self._drop_leaves()
        return everywhere

    def give_up(self) -> None:
        """Drops all gradients, and abandons running collectives."""
        self._going.clear()
        self._announced = None
        self._drop_leaves()
        for _, flat in self._flats:
            flat.gradients.drop()
            for piece in flat.pieces:
                piece._hold(None)

    def _totals(self, weight: float, facts: Sequence[bool]) -> tuple[float, dict[int, NDArray[np.bool_]], list[bool]]:
        """Returns the total weight, use of parameters by any rank (by identity of the array), and facts true on all."""
        sent = {id(scattering.flat): scattering.used for scattering in self._going}
        flags = [sent.get(id(flat)) or self._used_here(flat) for _, flat in self._flats]
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

    def _used_here(self, flat: Flat) -> list[bool]:
        """Returns for each parameter of an array that was not sent whether this rank has used it."""
        now = flat.gradients.used_flags()
        return [a or b for a, b in zip(now, self._used.get(id(flat), now), strict=True)]


_OTHER_UNITS = (
    "{} does not run the same units as this rank's first one: a rank gathers its units in its first microbatch of a "
    "step, and sends their gradients in its last, so all microbatches must run the same ones"
)


class UnitRunner:
    """Runs the units of a model; the `GradientReducer` of FSDP.

    The units are in the order in which they run forward, as far as it is known; `ahead` of them are gathered before
    they run. `paths` has the paths of all pieces, by identity.
    """

    def __init__(self, units: Sequence[Unit], paths: Mapping[int, str], group: Group, ahead: int) -> None:
        self._all = tuple(units)
        self._ahead = ahead
        self._forward = UnitOrder([n for n, unit in enumerate(self._all) if unit.flats])
        self._backward = UnitOrder(_backward_guess(self._all))
        self._number = {id(unit): n for n, unit in enumerate(self._all)}
        self._pairs = [(paths[id(piece)], p, piece) for unit in self._all for p, piece in unit.pairs()]
        self._group = group
        self._passed = EVEN
        """The order of the last backward pass."""
        self._began = EVEN
        """The order of the last forward pass."""
        self._ran: set[int] = set()
        """Numbers of the units that ran forward under that order."""
        self._ran_first: set[int] = set()
        """Numbers of those in this rank's first leaf of the step."""
        self._reduction = UnitReduction(self._all, group)
        self._order: UnitOrder | None = None
        """The order of the running pass; None between passes."""
        self._backwards = self._ignores = self._early = False
        self.prefetched = False
        """True after `prefetch`, until the next pass or until this rank changes its shard."""
        self._fetched = False
        """True after `prefetch`, until the next pass; the same on all ranks."""
        self.refit()

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._all)

    def begin_pass(self, order: SumOrder) -> None:
        """See `GradientReducer`. The same units must have run forward as in this rank's first leaf."""
        before, self._passed = self._passed, order
        if order.leaves:
            if self._group._core.engine_name != "links" and any(
                flat.on_device for unit in self._all for flat in unit.flats
            ):
                raise UnsupportedOp(NO_FIXED_ORDER)  # also in a world of one, where a second worker may join
            if self._ran != self._ran_first:
                raise StepOrderError(_OTHER_UNITS.format(order.name))
            check_placement(self._all, self._group.size)
            order.check_follows(before, chain(self.parameters.items(), self.sources.items()))
        self._reduction.begin_pass(order)

    def set_aside(self, *, weight: float) -> None:
        """See `GradientReducer`."""
        self._reduction.set_aside(weight)

    def held_sums(self) -> None:
        """See `SumsHolder`: the sums of an undone step are not kept."""

    def recover_sums(self) -> None:
        """See `SumsHolder`: there are none."""

    @property
    def _keeps_whole(self) -> bool:
        """True if units stay whole after they have run, because this rank's later leaves of the step need them."""
        order = self._group._core.order
        return order.is_leaf and not (order.is_last and self._backwards)

    def fits(self) -> bool:
        """False once a parameter was frozen or unfrozen, in the module or through its piece."""
        return all(unit.fits() for unit in self._all)

    def refit(self) -> None:
        """Records that the ranks have agreed on which parameters are frozen."""
        for unit in self._all:
            unit.refit()
        trained = [(path, p, piece) for path, p, piece in self._pairs if piece.requires_grad]
        self.parameters: Mapping[str, Parameter] = {path: piece for path, _, piece in trained}
        self.sources: Mapping[str, Parameter] = {path: p for path, p, _ in trained}

    @contextmanager
    def running_forward(self, unit: Unit) -> Iterator[None]:
        """Keeps a unit whole while it runs forward inside the block. A module's backward may run it again."""
        order = self._group._core.order
        if order.is_leaf and not self._backwards:
            number = self._number[id(unit)]
            if not order.is_first and number not in self._ran_first:
                raise StepOrderError(_OTHER_UNITS.format(order.name))
            self._ran.add(number)
        with self._whole(unit):
            yield
        if not self._backwards:
            unit.runs += 1

    @contextmanager
    def running_backward(self, unit: Unit) -> Iterator[None]:
        """Keeps a unit whole while it runs backward inside the block, and sends its gradients afterwards."""
        self._reduction.make_room()
        with self._whole(unit), unit.taking_gradients(ignore=self._ignores):
            yield
        unit.left -= 1
        if self._early and unit.left <= 0:
            self._reduction.send(unit)

    @contextmanager
    def _whole(self, unit: Unit) -> Iterator[None]:
        if self._order is None:
            raise StepOrderError("this FSDP wraps a part of a model that another FSDP wraps as a whole: call that one")
        if unit.flats:
            coming = self._order.enter(self._number[id(unit)], self._ahead)
            with self._group._core.order.collectives():
                unit.wait()
                for number in coming:
                    self._all[number].fetch()
        unit.inside += 1
        try:
            yield
        finally:
            unit.inside -= 1
            if not unit.inside and not self._keeps_whole:
                unit.release()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Surrounds a forward pass of the whole model."""
        order = self._group._core.order
        begins = not order.is_leaf or order is not self._began
        gathers = begins and order.is_first
        self._began = order
        if begins:
            self._ran = set()
            if gathers:
                self._ran_first = self._ran
        for unit in self._all:
            unit.runs = 0
            if gathers and unit.placement.keeps_full:
                unit.expire()  # any rank may have changed its shard in place
            elif gathers:
                unit.release()  # it may be whole here only, if an attempt at the step ended in the middle
        with self._passing(self._forward):
            yield

    @contextmanager
    def watching(self, *, weight: float, early: bool) -> Iterator[None]:
        """Surrounds a backward pass of the whole model; arguments as for `BucketReducer.watching`."""
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
    def _passing(self, order: UnitOrder) -> Iterator[None]:
        try:
            with self._group._core.order.collectives():
                self._refresh()
            self._order = order
            order.start()
            yield
            order.end()
        finally:
            self._order = None
            self.prefetched = self._fetched = False
            if not self._keeps_whole:
                for unit in self._all:  # units that were gathered and not used
                    unit.drop()

    def prefetch(self) -> None:
        """Starts to gather the units that the next forward pass begins with."""
        self.prefetched = self._fetched = True
        for number in self._forward.first(max(1, self._ahead)):
            if not self._all[number].placement.keeps_full:  # a kept array may be written while it is sent
                self._all[number].fetch()

    def expire(self) -> None:
        """Frees whole arrays and drops running gathers: they are out of date, because shards have changed."""
        self.prefetched = False
        for unit in self._all:
            unit.expire()

    def _refresh(self) -> None:
        """Gathers prefetched units again if any rank has changed its shard since; the ranks decide this together."""
        if self._fetched and self._group.size > 1:
            changed = not self.prefetched or any(flat.was_changed() for unit in self._all for flat in unit.flats)
            if self._group.all_reduce(np.array([changed], np.int64))[0]:
                self.expire()

    @contextmanager
    def summoned(self) -> Iterator[None]:
        """Makes every parameter whole and exact inside the block, and keeps changes of values made there."""
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

    def finish(self, *, weight: float, replaces: bool = False) -> None:
        """Sends the remaining gradients, waits for all, and leaves the weighted means in the pieces.

        A parameter that no rank used gets no gradient. If users have written gradients themselves (`replaces`), these
        replace the pieces' gradients. A piece whose gradient nobody wrote keeps what it has.

        Raises:
            StepOrderError: the weights of all ranks add up to 0, a gradient came after its unit's were sent, or the
                call is inside `summoned`.
        """
        self._check_not_summoned()
        before: list[tuple[Parameter, NDArray[Any] | None]] = []
        if replaces:
            before = [(piece, piece.grad) for _, _, piece in self._pairs]
            for piece, _ in before:
                piece._hold(None)
        orders = (self._forward, self._backward)
        everywhere = self._reduction.finish(weight, [order.is_complete for order in orders])
        for order, complete in zip(orders, everywhere, strict=True):
            if complete:
                order.commit()
        for piece, gradient in before:
            if piece.grad is None:
                piece._hold(gradient)
        self.expire()

    def give_up(self) -> None:
        """Drops all gradients, and abandons running collectives, since other ranks may never send their part."""
        self._passed = EVEN
        self._reduction.give_up()
        for unit in self._all:
            unit.drop()

    def _check_not_summoned(self) -> None:
        if self.are_summoned:
            raise StepOrderError(
                "unshard() allows no backward pass: an update would not change the whole parameters there"
            )


def _backward_guess(units: Sequence[Unit]) -> list[int]:
    """Returns the expected order of units in backward: the outermost first, then the others from last to first."""
    numbers = [n for n, unit in enumerate(units) if unit.flats]
    outermost = [n for n in numbers if n == 0]
    return outermost + [n for n in reversed(numbers) if n != 0]
