"""Reduces gradients over the ranks: sends each bucket as soon as it may go, and waits for all of them at the end.

Owns the buckets and the running collectives. `readiness` decides when buckets are sent; the caller gives the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from paceline.collectives.piggyback import PIGGYBACK_SIZE, Piggyback
from paceline.compression.bf16 import Bf16
from paceline.compression.codec import Codec
from paceline.errors import StepOrderError
from paceline.parallel.buckets import FIRST_BYTES, Bucket, Empty, plan_buckets
from paceline.parallel.low_rank import LowRankBucket, shrinks
from paceline.parallel.parameter import Parameter, ignoring_gradients
from paceline.parallel.ranks import PendingWork, Ranks
from paceline.parallel.readiness import Readiness

__all__ = ["Reducer"]

_TOO_SMALL_BYTES = 64 << 10
"""Bytes up to which a single bucket is sent at the end of backward in the caller's thread: the hand-over to the
group's thread and back, 30 us and more on a busy machine, takes longer than overlap could save."""


class Reducer:
    """Watches the parameters during a backward pass, and all-reduces their gradients bucket by bucket.

    Args:
        parameters: all parameters by path; the frozen ones are left out.
        group: the ranks to reduce over.
        cap_bytes: most bytes of gradients in one bucket.
        codec: compresses gradients on the wire, but not weights and flags; None for no compression.
        rank: of `PowerSGD`; 0 for all of every matrix.
        feedback: with a codec, adds the rounding errors of a pass to the gradients of the next.
        static: see `Readiness`.
        narrow: whether gradients may be in 16 bits. Without a codec bfloat16 is sent as it is, with all bits.

    Attributes:
        parameters: the trained parameters, by path.
        sources: the same, since backward writes the gradients that optimizers see.
        stepwise: True if the caller marks where steps begin (`begin_step`) and may undo one. If False, each pass is
            final at once.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        group: Ranks,
        cap_bytes: float,
        *,
        codec: Codec | None = None,
        rank: int = 0,
        feedback: bool = False,
        static: bool = False,
        narrow: bool = False,
    ) -> None:
        plan = plan_buckets(parameters, cap_bytes, FIRST_BYTES, narrow=narrow)
        self._all, self._cap_bytes = list(parameters.values()), cap_bytes
        self.stepwise = False
        self.parameters = {path: p for path, p in parameters.items() if p.requires_grad}
        self.sources = self.parameters
        self._frozen = [p for p in parameters.values() if not p.requires_grad]
        self._group = group
        # Buckets are always sent in this order, so the first one carries the piggyback.
        rooms = [PIGGYBACK_SIZE, *([0] * len(plan))]
        self._buckets = [
            _bucket({path: parameters[path] for path in paths}, rank, room, group.empty, feedback)
            for paths, room in zip(plan, rooms, strict=False)
        ]
        self._codecs = [
            Bf16() if codec is None and bucket.dtype.name == "bfloat16" else codec for bucket in self._buckets
        ]
        self._overlaps = len(plan) > 1 or any(bucket.flat.nbytes > _TOO_SMALL_BYTES for bucket in self._buckets)
        self._given_up: list[tuple[Bucket, list[PendingWork]]] = []
        """Buckets that abandoned collectives were still using, each with these collectives."""
        self._piggyback: Piggyback | None = None
        self._paths = [path for paths in plan for path in paths]
        self._index = {id(parameters[path]): i for i, path in enumerate(self._paths)}
        self._readiness = Readiness([number for number, paths in enumerate(plan) for _ in paths], static=static)
        self._works: list[PendingWork | None] = []
        """The collective of each bucket sent in this pass; None if it is complete, or not needed in a world of one."""
        self._weight = 0.0

    def fits(self) -> bool:
        """False once a parameter was frozen or unfrozen: the buckets must be laid out anew."""
        return all(p.requires_grad for p in self.parameters.values()) and not any(p.requires_grad for p in self._frozen)

    def serves(self, parameters: Mapping[str, Parameter], cap_bytes: float) -> bool:
        """True if it was made for these parameters and this cap, so that it can be used in another generation."""
        same = self.fits() and list(map(id, self._all)) == list(map(id, parameters.values()))
        return same and self._cap_bytes == cap_bytes

    def new_generation(self) -> None:
        """Resets what must be the same on all ranks, because a new generation has other ranks."""
        for bucket in self._buckets:
            if isinstance(bucket, LowRankBucket):
                bucket.new_generation()

    def begin_step(self) -> None:
        """Makes earlier reductions final: `give_up` returns to this point."""
        self._recover()
        for bucket in self._buckets:
            bucket.memory.commit()

    @contextmanager
    def watching(self, *, weight: float, early: bool) -> Iterator[None]:
        """Watches the backward pass inside the block.

        Args:
            weight: this rank's weight, including that of earlier micro-batches.
            early: buckets may be sent inside the block. False while gradients are only accumulated.
        """
        self._recover()
        self._weight = weight
        self._readiness.start(early=early and self._overlaps)
        try:
            for parameter in self.parameters.values():
                parameter._watch(self)
            yield
        finally:
            for parameter in self.parameters.values():
                parameter._unwatch(self)
        self._readiness.end()

    @contextmanager
    def ignoring(self, *, weight: float, early: bool) -> Iterator[None]:
        """Drops the gradients of the backward pass inside the block, which are written to separate arrays.

        All buckets are sent at the end, since they have none of this rank's work; the arguments, as for `watching`, are
        ignored.
        """
        with ignoring_gradients(self.parameters.values()):
            yield

    def before_gradient(self, parameter: Parameter) -> None:
        """Refuses a gradient whose bucket has been sent."""
        index = self._index[id(parameter)]
        if not self._readiness.may_write(index):
            raise StepOrderError(
                f"parameter {self._paths[index]!r} got one more gradient after its bucket was sent: this backward pass "
                "uses it more often than any before. This attempt is dropped; the next one will wait for it"
            )

    def after_gradient(self, parameter: Parameter) -> None:
        """Sends the buckets that this gradient completes."""
        self._send(self._readiness.signal(self._index[id(parameter)]))

    def finish(self, *, weight: float) -> None:
        """Sends the remaining buckets, waits for all, and leaves the weighted means in the gradients.

        Raises:
            StepOrderError: the weights of all ranks add up to 0; or no collective may be called now, in a world of one
                too, since the same code may run with two members next.
            PacelineError: a collective failed.
        """
        if self._group.ban_reason:
            raise StepOrderError(self._group.ban_reason)
        self._recover()
        self._weight = weight
        self._send(self._readiness.rest(), waiting=True)
        for bucket, codec, work in zip(self._buckets, self._codecs, self._works, strict=True):
            if work is not None:
                work.wait()
            if self._piggyback is not None:
                self._piggyback.arrive(bucket.piggyback[: len(self._piggyback.values)])
                self._piggyback = None
            if isinstance(bucket, LowRankBucket) and bucket.compresses:
                second = bucket.second()
                self._group.all_reduce(second, out=second)
            # The first bucket has the total weight, by which the other sums may have been divided already.
            divided = self._divides(bucket, codec) and self._group.size > 1
            bucket.unpack(self._buckets[0].total.item(), divided=divided)
        self._works.clear()
        self._readiness.start(early=False)
        if not self.stepwise:
            for bucket in self._buckets:
                bucket.memory.commit()

    def give_up(self) -> None:
        """Drops all gradients, and abandons running collectives.

        It does not wait, because other ranks may never send their part. A collective that still runs when the next
        attempt begins keeps its memory and cannot touch that of the new attempt.
        """
        for parameter in self.parameters.values():
            parameter._hold(None)
        self._piggyback = None
        running = [work for work in self._works if work is not None and not work.done()]
        for bucket, work in zip_longest(self._buckets, self._works):
            # Collectives of other buckets read the total weight from the first bucket.
            users = running if bucket is self._buckets[0] else [other for other in running if other is work]
            if users:
                bucket.vacate()
                self._given_up.append((bucket, users))
            elif all(bucket is not other for other, _ in self._given_up):
                bucket.settle()
                bucket.memory.undo()
        self._works.clear()
        self._readiness.start(early=False)

    def _recover(self) -> None:
        """Gives abandoned buckets their memory back, or new memory if a collective still uses it."""
        given_up, self._given_up = self._given_up, []
        for bucket, users in given_up:
            if all(work.done() for work in users):
                bucket.settle()
                bucket.memory.undo()
            else:
                bucket.renew()
                bucket.memory = bucket.memory.successor()

    def _send(self, numbers: Iterable[int], *, waiting: bool = False) -> None:
        """Sends buckets; `waiting`: the caller only waits, so the last bucket is reduced in its thread."""
        for number in numbers:
            bucket = self._buckets[number]
            alone = self._group.size == 1
            if isinstance(bucket, LowRankBucket):
                bucket.compresses = not alone
            bucket.pack(self._weight)
            if not self._works and not alone:
                self._piggyback = self._group.take_piggyback()
                bucket.piggyback.fill(0)
                if self._piggyback is not None:
                    bucket.piggyback[: len(self._piggyback.values)] = self._piggyback.values
            behind = not (waiting and bucket is self._buckets[-1])
            work = None if alone else self._reduce(bucket, self._codecs[number], behind=behind)
            self._works.append(work if behind else None)

    def _divides(self, bucket: Bucket, codec: Codec | None) -> bool:
        """Whether a bucket's sums are divided during the reduction."""
        return bucket is not self._buckets[0] and codec is None and bucket.divisible

    def _reduce(self, bucket: Bucket, codec: Codec | None, *, behind: bool) -> Any:
        flat, first = bucket.flat, self._buckets[0]
        if codec is None:
            # The first bucket is complete by then, since buckets are reduced in order.
            divisor = first.total.item if self._divides(bucket, codec) else None
            return self._group.all_reduce(flat, op="sum", out=flat, divisor=divisor, async_op=behind)
        return self._group.all_reduce_compressed(
            flat, codec, exact=bucket.exact, memory=bucket.memory, out=flat, async_op=behind
        )


def _bucket(parameters: Mapping[str, Parameter], rank: int, room: int, empty: Empty, feedback: bool) -> Bucket:
    if rank and any(shrinks(parameter, rank) for parameter in parameters.values()):
        return LowRankBucket(parameters, rank, room, empty, feedback)
    return Bucket(parameters, room, empty, feedback and not rank)
