"""DDP's reducer: sends each bucket of gradients as soon as it is complete, and waits for all of them at the end.

`Readiness` decides when a bucket may be sent while the backward pass still runs. It follows two rules:

- Buckets are sent in one fixed order on every rank, whatever the order of gradients, because the n-th collective of
  one rank meets the n-th of every other.
- A parameter is complete once it has signalled as often as it ever did in one backward pass: a layer that runs twice
  signals twice. So the first pass only counts signals, and sends nothing early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from paceline._base.sum_order import EVEN, Node, SumOrder, SumsNotHeld
from paceline._base.work import Work
from paceline._group.group_core import PIGGYBACK_SIZE, Piggyback
from paceline._parallel._buckets import FIRST_BYTES, plan_buckets
from paceline._parallel._parameter import Parameter, ignoring_gradients
from paceline._parallel._transport import GradientBucket, GradientTransport
from paceline.errors import PacelineError, StepOrderError, UnsupportedOp

_TOO_SMALL_BYTES = 64 << 10
"""A model's only bucket, if it has at most this many bytes, is sent at the end of backward in the caller's thread: the
hand-over to the group's thread and back, 30 us and more on a busy machine, takes longer than overlap could save."""


class Readiness:
    """Decides which buckets may be sent, from signals that parameters have received gradients. Pure.

    If it is `static`, every pass gives the same signals as the first, so that an unused parameter delays no bucket.
    """

    def __init__(self, bucket_of: Sequence[int], *, static: bool = False) -> None:
        self._bucket_of = tuple(bucket_of)
        self._static = static
        self._expected = [1] * len(self._bucket_of)
        """Signals after which a parameter counts as complete. At least 1, unless `static`: a parameter that was never
        used may still be used later."""
        self._learned = False
        """True once the signals of a whole backward pass were counted."""
        self.start(early=False)

    def start(self, *, early: bool) -> None:
        """Begins a backward pass; with `early`, buckets may be sent while it runs."""
        self._early = early and self._learned
        self._seen = [0] * len(self._bucket_of)
        self._incomplete = [0] * (max(self._bucket_of, default=-1) + 1)
        for bucket, expected in zip(self._bucket_of, self._expected, strict=True):
            self._incomplete[bucket] += expected > 0
        self._sent = 0

    def may_write(self, parameter: int) -> bool:
        """Returns True if the parameter's bucket is unsent; if it was sent, the next pass waits for one more signal."""
        if self._bucket_of[parameter] >= self._sent:
            return True
        self._expected[parameter] = max(self._expected[parameter], self._seen[parameter] + 1)
        return False

    def signal(self, parameter: int) -> range:
        """Counts a signal; returns the buckets that may now be sent, in order."""
        self._seen[parameter] += 1
        if self._early and self._seen[parameter] == self._expected[parameter]:
            self._incomplete[self._bucket_of[parameter]] -= 1
        first = self._sent
        while self._early and self._sent < len(self._incomplete) and self._incomplete[self._sent] == 0:
            self._sent += 1
        return range(first, self._sent)

    def end(self) -> None:
        """Ends a complete backward pass: the next one is expected to give as many signals."""
        if self._static and not self._learned:
            self._expected = self._seen
        else:
            self._expected = [max(pair) for pair in zip(self._expected, self._seen, strict=True)]
        self._learned = True

    def rest(self) -> range:
        """Returns the buckets that have not been sent, in order, and marks them as sent."""
        first, self._sent = self._sent, len(self._incomplete)
        return range(first, self._sent)


class BucketReducer:
    """Observes the parameters during a backward pass, and sums their gradients over the ranks, bucket by bucket.

    The class is a `GradientReducer`, and the `GradientObserver` of its parameters.

    Args:
        parameters: all parameters by path; the frozen ones are left out.
        narrow: whether gradients may have 16 bits.

    Attributes:
        sources: the same as `parameters`, since backward writes the gradients that optimizers see.
        stepwise: True if the caller marks where steps begin (`begin_step`) and may undo one. If False, each pass is
            final at once.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        transport: GradientTransport,
        cap_bytes: float,
        *,
        static: bool = False,
        narrow: bool = False,
    ) -> None:
        plan = plan_buckets(parameters, cap_bytes, FIRST_BYTES, narrow=narrow)
        self._all, self._cap_bytes = list(parameters.values()), cap_bytes
        self.stepwise = False
        self.parameters = {path: p for path, p in parameters.items() if p.requires_grad}
        self.sources = self.parameters
        self._frozen = [p for p in parameters.values() if not p.requires_grad]
        self._transport = transport
        # Buckets are always sent in this order, so the first one carries the piggyback.
        rooms = [PIGGYBACK_SIZE, *([0] * len(plan))]
        self._buckets: list[GradientBucket] = [
            transport.new_bucket({path: parameters[path] for path in paths}, room=room)
            for paths, room in zip(plan, rooms, strict=False)
        ]
        self._overlaps = len(plan) > 1 or any(bucket.nbytes > _TOO_SMALL_BYTES for bucket in self._buckets)
        self._abandoned: list[tuple[GradientBucket, list[Work[Any]]]] = []
        """Buckets that abandoned collectives still used, each with these collectives."""
        self._piggyback: Piggyback | None = None
        self._paths = [path for paths in plan for path in paths]
        self._index = {id(parameters[path]): i for i, path in enumerate(self._paths)}
        self._readiness = Readiness([number for number, paths in enumerate(plan) for _ in paths], static=static)
        self._works: list[Work[Any] | None] = []
        """The collective of each bucket sent in this pass; None if it is complete, or not needed in a world of one."""
        self._weight = 0.0
        self._order = EVEN
        """The order in which the gradients of this pass are summed."""
        self._label: object | None = None
        """`SumOrder.label` of the passes in which the buckets got the sums that they hold, or kept them."""
        self._passing = False
        """True from the beginning of a pass until all its gradients are there."""
        self._failure: PacelineError | None = None
        """Why no bucket of this pass is sent any more, though the pass goes on: its sums may be kept."""

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        """The buckets, in the order in which they are sent."""
        return self._buckets

    def fits(self) -> bool:
        """False once a parameter was frozen or unfrozen: the buckets must be laid out anew."""
        return all(p.requires_grad for p in self.parameters.values()) and not any(p.requires_grad for p in self._frozen)

    def serves(self, parameters: Mapping[str, Parameter], cap_bytes: float) -> bool:
        """Returns True if the reducer was made for these parameters and this cap: the next generation can use it."""
        same = self.fits() and list(map(id, self._all)) == list(map(id, parameters.values()))
        return same and self._cap_bytes == cap_bytes

    def new_generation(self) -> None:
        """Resets what must be the same on all ranks, because a new generation has other ranks."""
        for bucket in self._buckets:
            bucket.new_generation()

    def begin_step(self) -> None:
        """Makes earlier reductions final: `give_up` returns to this point."""
        self._recover()
        for bucket in self._buckets:
            bucket.commit()

    def begin_pass(self, order: SumOrder) -> None:
        """See `GradientReducer`."""
        if order.leaves and (refusal := self._transport.tree_refusal):
            raise UnsupportedOp(refusal)
        before, self._order = self._order, order
        if order.is_first:
            self._recover()
            if order.kept and not (self._label is order.kept_label and self._holds(order.kept)):
                raise SumsNotHeld("a wrapper has none of the sums that were kept when the step was undone")
            self._label = order.label
            for bucket in self._buckets:
                bucket.keep_nodes(order.kept, spare=order.spare)
        order.check_follows(before, self.parameters.items())

    def _holds(self, nodes: Sequence[Node]) -> bool:
        """Returns True if all buckets have the sums of these nodes."""
        return all(set(bucket.nodes) >= set(nodes) for bucket in self._buckets)

    def set_aside(self, *, weight: float) -> None:
        """See `GradientReducer`."""
        for bucket in self._buckets:
            bucket.pack(weight, alone=self._transport.size == 1)
            bucket.piggyback.fill(0)
            bucket.add_leaf(self._order)

    def recover_sums(self) -> None:
        """See `SumsHolder`."""
        self._recover()

    def held_sums(self) -> tuple[object, tuple[Node, ...]] | None:
        """See `SumsHolder`: None if a pass was interrupted: then buckets may hold the sums of different leaves."""
        held = {bucket.nodes for bucket in self._buckets}
        whole = len(held) == 1 and not self._passing
        return (self._label, held.pop()) if self._label is not None and whole else None

    @contextmanager
    def watching(self, *, weight: float, early: bool) -> Iterator[None]:
        """Observes the backward pass inside the block.

        The weight includes earlier micro-batches' weights. `early` is False while gradients are only accumulated: no
        bucket is sent inside the block then.
        """
        self._recover()
        self._weight, self._failure, self._passing = weight, None, True
        self._readiness.start(early=early and self._overlaps)
        try:
            for parameter in self.parameters.values():
                parameter._watch(self)
            yield
        finally:
            for parameter in self.parameters.values():
                parameter._unwatch(self)
        self._readiness.end()
        self._passing = False

    @contextmanager
    def ignoring(self, *, weight: float, early: bool) -> Iterator[None]:
        """Drops the gradients of the backward pass inside the block, which are written to separate arrays.

        All buckets are sent at the end, since they contain no gradients of this rank.
        """
        self._failure, self._passing = None, True
        with ignoring_gradients(self.parameters.values()):
            yield
        self._passing = False

    def before_gradient(self, parameter: Parameter) -> None:
        """Refuses a gradient whose bucket has been sent."""
        index = self._index[id(parameter)]
        if not self._readiness.may_write(index):
            raise StepOrderError(
                f"parameter {self._paths[index]!r} got another gradient after its bucket was sent: this backward pass "
                "uses the parameter more often than any before. This attempt is dropped; the next one will wait for "
                "the additional gradient"
            )

    def after_gradient(self, parameter: Parameter) -> None:
        """Sends the buckets that this gradient completes."""
        self._send(self._readiness.signal(self._index[id(parameter)]))

    def finish(self, *, weight: float, replaces: bool = False) -> None:
        """Sends the remaining buckets, waits for all, and leaves the weighted means in the gradients.

        Backward writes the gradients that optimizers see, so `replaces` changes nothing here.

        Raises:
            StepOrderError: the weights of all ranks add up to 0; or no collective may be called now. A world of one
                raises this too, because the same code may run with two members next.
        """
        del replaces
        if self._transport.ban_reason:
            raise StepOrderError(self._transport.ban_reason)
        self._recover()
        self._weight = weight
        self._send(self._readiness.rest(), waiting=True)
        if self._failure is not None:
            raise self._failure
        alone = self._transport.size == 1
        for bucket, work in zip(self._buckets, self._works, strict=True):
            if work is not None:
                work.wait()
            if self._piggyback is not None:
                self._piggyback.arrive(bucket.piggyback[: len(self._piggyback.values)])
                self._piggyback = None
            if not alone:
                self._transport.complete(bucket)
            # The first bucket has the total weight, by which the other sums may have been divided already.
            bucket.unpack(self._buckets[0].total.item(), divided=self._divides(bucket) and not alone)
        self._works.clear()
        self._readiness.start(early=False)
        if not self.stepwise:
            for bucket in self._buckets:
                bucket.commit()

    def give_up(self) -> None:
        """Drops all gradients, and abandons running collectives.

        It does not wait, because other ranks may never send their part. A collective that still runs when the next
        attempt begins keeps its memory and cannot touch the new attempt's. Sums of nodes stay, because the next
        attempt may keep them (`SumOrder.kept`).
        """
        for parameter in self.parameters.values():
            parameter._hold(None)
        if self._passing:  # its leaf may be in some buckets, without all of its gradients
            self._label = None
        self._order, self._piggyback, self._failure = EVEN, None, None
        self._passing = False
        running = [work for work in self._works if work is not None and not work.done()]
        for bucket, work in zip_longest(self._buckets, self._works):
            # Collectives of other buckets read the total weight from the first bucket.
            users = running if bucket is self._buckets[0] else [other for other in running if other is work]
            if users:
                bucket.vacate()
                self._abandoned.append((bucket, users))
            elif all(bucket is not other for other, _ in self._abandoned):
                bucket.reclaim()
        self._works.clear()
        self._readiness.start(early=False)

    def _recover(self) -> None:
        """Gives abandoned buckets their memory back, or new memory if a collective still uses it."""
        abandoned, self._abandoned = self._abandoned, []
        for bucket, users in abandoned:
            if all(work.done() for work in users):
                bucket.reclaim()
            else:
                bucket.renew()

    def _send(self, numbers: Iterable[int], *, waiting: bool = False) -> None:
        """Sends buckets; with `waiting`, the caller has nothing else to do, so its thread reduces the last one.

        If a collective fails in a tree, the error is kept in `_failure`: the backward pass goes on, so that the leaf is
        finished and can be kept.
        """
        for number in numbers:
            bucket = self._buckets[number]
            alone = self._transport.size == 1
            bucket.pack(self._weight, alone=alone)
            bucket.piggyback.fill(0)
            if number == 0 and not alone:
                self._piggyback = self._transport.take_piggyback()
                if self._piggyback is not None:
                    bucket.piggyback[: len(self._piggyback.values)] = self._piggyback.values
            if self._order.leaves:
                bucket.add_leaf(self._order)
            if alone:
                self._works.append(None)
                continue
            if self._failure is not None:
                continue
            # Buckets are reduced in order, so the first is complete when the divisor of another is asked for.
            divisor = self._buckets[0].total.item if self._divides(bucket) else None
            in_background = not (waiting and bucket is self._buckets[-1])
            try:
                self._works.append(self._transport.start(bucket, divisor=divisor, in_background=in_background))
            except PacelineError as error:
                if not self._order.leaves:
                    raise
                self._failure = error

    def _divides(self, bucket: GradientBucket) -> bool:
        """Returns True if a bucket's sums are divided while they are reduced."""
        return bucket is not self._buckets[0] and bucket.divisible
