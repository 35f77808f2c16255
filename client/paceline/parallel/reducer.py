"""Reduces gradients over the ranks: sends each bucket as soon as it may go, and waits for all of them at the end.

Owns the buckets and what is under way; decides nothing (`readiness` does) and knows no weights but the one it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from paceline.collectives.passenger import PASSENGER_SIZE, Passenger
from paceline.errors import StepOrderError
from paceline.parallel.buckets import Bucket, plan_buckets
from paceline.parallel.parameter import Parameter, ignoring_gradients
from paceline.parallel.ranks import PendingWork, Ranks
from paceline.parallel.readiness import Readiness

__all__ = ["Reducer"]


class Reducer:
    """Watches the parameters during a backward pass, and all-reduces their gradients bucket by bucket.

    Args:
        parameters: all parameters by path; the frozen ones are left out.
        group: the ranks to reduce over.
        cap_bytes: most bytes of gradients in one bucket.

    Attributes:
        parameters: those that are trained, by path.
        sources: the same: here backward writes what optimizers see.
    """

    def __init__(self, parameters: Mapping[str, Parameter], group: Ranks, cap_bytes: float) -> None:
        plan = plan_buckets(parameters, cap_bytes)
        self.parameters = {path: p for path, p in parameters.items() if p.requires_grad}
        self.sources = self.parameters
        self._frozen = [p for p in parameters.values() if not p.requires_grad]
        self._group = group
        # Buckets go in this order always, so the first is the one to ride in.
        rooms = [PASSENGER_SIZE, *([0] * len(plan))]
        self._buckets = [
            Bucket({path: parameters[path] for path in paths}, room) for paths, room in zip(plan, rooms, strict=False)
        ]
        self._passenger: Passenger | None = None
        self._paths = [path for paths in plan for path in paths]
        self._index = {id(parameters[path]): i for i, path in enumerate(self._paths)}
        self._readiness = Readiness([number for number, paths in enumerate(plan) for _ in paths])
        self._works: list[PendingWork | None] = []
        """One for each bucket sent in this pass; None in a world of one, which sends nothing."""
        self._weight = 0.0

    def fits(self) -> bool:
        """False once a parameter was frozen or unfrozen: the buckets must be laid out anew."""
        return all(p.requires_grad for p in self.parameters.values()) and not any(p.requires_grad for p in self._frozen)

    @contextmanager
    def watching(self, *, weight: float, early: bool) -> Iterator[None]:
        """For a backward pass inside the block.

        Args:
            weight: this rank's weight, that of earlier micro-batches included.
            early: buckets may be sent inside the block. False while gradients are only accumulated.
        """
        self._weight = weight
        self._readiness.start(early=early)
        try:
            for parameter in self.parameters.values():
                parameter._watch(self)
            yield
        finally:
            for parameter in self.parameters.values():
                parameter._unwatch(self)
        self._readiness.end()

    @contextmanager
    def ignoring(self, *, early: bool) -> Iterator[None]:
        """For a backward pass whose gradients must not count: they go to arrays of their own and are dropped.

        Buckets all go at the end, for none of this rank's work is in them; `early` changes nothing.
        """
        with ignoring_gradients(self.parameters.values()):
            yield

    def before_gradient(self, parameter: Parameter) -> None:
        """Refuses a gradient whose bucket has been sent."""
        index = self._index[id(parameter)]
        if not self._readiness.may_write(index):
            raise StepOrderError(
                f"parameter {self._paths[index]!r} got one more gradient after its bucket was sent: this backward pass "
                "uses it more often than any before. The attempt is given up; the next one will wait for it"
            )

    def after_gradient(self, parameter: Parameter) -> None:
        """Sends the buckets that this gradient completes."""
        self._send(self._readiness.signal(self._index[id(parameter)]))

    def finish(self, *, weight: float) -> None:
        """Sends what is left, waits for all, and leaves the weighted means in the gradients.

        Raises:
            StepOrderError: the weights of all ranks add up to 0.
            PacelineError: a collective failed.
        """
        self._weight = weight
        self._send(self._readiness.rest())
        for bucket, work in zip(self._buckets, self._works, strict=True):
            if work is not None:
                work.wait()
            if self._passenger is not None:
                self._passenger.arrive(bucket.passenger[: len(self._passenger.values)])
                self._passenger = None
            bucket.unpack()
        self._works.clear()
        self._readiness.start(early=False)

    def give_up(self) -> None:
        """Drops all gradients, and what is under way.

        It does not wait: others may never send their part. A collective that still runs keeps the old memory, sends
        from it what it would have sent, and can reach nothing of the next attempt.
        """
        for parameter in self.parameters.values():
            parameter._hold(None)
        self._works.clear()
        self._passenger = None
        for bucket in self._buckets:
            bucket.renew()
        self._readiness.start(early=False)

    def _send(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            bucket = self._buckets[number]
            bucket.pack(self._weight)
            alone = self._group.size == 1
            if not self._works and not alone:
                self._passenger = self._group.board()
                bucket.passenger.fill(0)
                if self._passenger is not None:
                    bucket.passenger[: len(self._passenger.values)] = self._passenger.values
            self._works.append(
                None if alone else self._group.all_reduce(bucket.flat, op="sum", out=bucket.flat, async_op=True)
            )
