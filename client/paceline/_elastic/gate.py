"""The words that the members of a view exchange at the gate of a step.

Each says with its step word that it has entered the step. The word travels with the first gradients, so it cannot say
how the step ends. A member that makes an update says nothing more: it applies the step. One whose block ends without an
update asks all others whether they skip the step too, in a collective of its own. Where they do it completes, and
nobody has changed anything. Where one makes the update it calls something else, so the calls do not match, and the
text says what the member that stands alone has done, and in which line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._base.work import Work
from paceline._group import Group
from paceline._links.fault import Fault
from paceline.errors import StepOrderError

BARRED = (
    "a collective after optimizer.step() of the same step: the state has changed, and could not be restored if the "
    "collective failed; call it before the update, or after the step inside session.retry()"
)

OR_COPY = (
    ". A step with several updates, such as that of a GAN, calls step.keep_copy() before the first: then all of them "
    "are undone together"
)

HALF_UPDATED = (
    "a collective after an optimizer.step() that was interrupted half way: the other ranks would apply what this one "
    "computes from half an update. Let the error leave the block of the step"
)

BETWEEN_STEPS = (
    "a collective between two steps: if a worker were lost in it, nothing would run it again. Call it in "
    "`for attempt in session.retry(): with attempt: ...`, or inside `with step:` before optimizer.step(). "
    "If the loop was left by `break`, close or delete its iterator first"
)
"""The text of the error that refuses a collective between two steps."""


@contextmanager
def acting_alone(fault: Fault, what: str) -> Iterator[None]:
    """Inside the block, calls that do not match are due to what this member does, and the error says that.

    Args:
        fault: of the generation.
        what: "rank 1 (host, pid 7) ...", with the line of code.
    """
    fault.account = what
    try:
        yield
    finally:
        fault.account = ""


class PendingStepWord:
    """One member's step word while it is summed over the members: in a bucket of gradients, or in its own message.

    Args:
        group: the view.
        values: the word.
        step: number of its step.
        with_gradients: True if it waits for a bucket of gradients; the same on all ranks. Otherwise it is sent at once,
            while the step computes.

    Raises:
        PacelineError: the generation has failed.
    """

    def __init__(self, group: Group, values: Sequence[float], step: int, *, with_gradients: bool) -> None:
        self.values = np.array(values, np.float64)
        self._group = group
        self._label = f"step-{step}"
        self._sums: Sequence[float] | None = None
        self._work: Work[NDArray[Any]] | None = None
        if with_gradients:
            group.mesh.fault.check()
            group.add_piggyback(self)
        else:
            self._work = group.all_reduce(self.values, label=self._label, async_op=True)

    def arrive(self, sums: NDArray[Any]) -> None:
        """See `Piggyback.arrive`."""
        self._sums = sums.tolist()

    def wait(self) -> Sequence[float]:
        """Returns the sums over all members, once all have entered the step.

        Raises:
            StepOrderError: the word should have gone with gradients that were dropped.
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
