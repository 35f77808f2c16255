"""`Session.batches`: the parts of each step's samples, one after the other, for code whose loop is over batches."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, Self, TypeVar

from paceline._elastic.step import Step
from paceline.errors import StepOrderError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Loader(Protocol[T_co]):
    """An object that has the parts of a step, such as `paceline.torch.ElasticBatches`."""

    def parts(self, step: Step) -> Sequence[T_co]:
        """Returns this rank's parts, at least one, equally many on every rank; called in each attempt."""


class StepParts(Generic[T]):
    """The parts of each step's samples, as `Session.batches` gives them."""

    def __init__(self, steps: Iterator[Step], loader: Loader[T]) -> None:
        self._steps = steps
        self._loader = loader
        self._left: deque[T] = deque()
        self._current: Step | None = None
        """The attempt whose block is open."""
        self._waits = False
        """Whether a part was given whose block has not begun."""

    @property
    def step(self) -> AbstractContextManager[Step]:
        """The block for the body of the loop: `with batches.step as step`; see `Step`."""
        return self._block()

    @property
    def in_step(self) -> bool:
        """True from the first part of a step until the block of its last part ends, or the step is undone."""
        return self._current is not None

    @property
    def is_last(self) -> bool:
        """True if the present part is the last one of its step, after which the optimizer updates the model."""
        return not self._left

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._waits:
            raise StepOrderError(
                "a batch was not used in its step: write `for batch in batches: with batches.step: ...`"
            )
        while not self._left:
            step = self._current = next(self._steps)
            step.__enter__()
            try:
                self._left.extend(self._loader.parts(step))
                if not self._left:
                    raise StepOrderError(f"{type(self._loader).__name__}.parts(step) has returned no part")
            except BaseException as error:
                if not self._end(error):
                    raise
        self._waits = True
        return self._left.popleft()

    @contextlib.contextmanager
    def _block(self) -> Iterator[Step]:
        if not self._waits or self._current is None:
            raise StepOrderError("`with batches.step` belongs around the body of `for batch in batches`, once")
        self._waits = False
        try:
            yield self._current
        except BaseException as error:
            if not self._end(error):
                raise
        else:
            if not self._left:
                self._end(None)

    def _end(self, error: BaseException | None) -> bool:
        """Ends the attempt; returns False if the error is to be raised."""
        assert self._current is not None
        step, self._current = self._current, None
        self._left.clear()
        if error is None:
            return step.__exit__(None, None, None)
        return step.__exit__(type(error), error, error.__traceback__)
