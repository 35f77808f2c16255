"""`session.retry`: a block between two steps that changes no state, run again until no failure interrupts it.

Members wait for each other at the end of the block. So if one member is past the block, all have finished it, and a
member whose wait was interrupted must not run it again: otherwise it would repeat the block while another computes the
next step. A worker that is left out of the new generation skips the block too: the others are past it when it returns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType

from paceline._elastic.attempts import BlockOutcome, FailedAttempts
from paceline._elastic.gate import BETWEEN_STEPS
from paceline._elastic.mates import ALONE, Alone
from paceline._elastic.rounds import Point
from paceline._elastic.training_loop import TrainingLoop
from paceline._group import Group
from paceline.errors import PacelineError, StepVoid

_log = logging.getLogger("paceline.elastic")

_WHAT = "a block between steps"


class Attempt:
    """One attempt at a block; a context manager that swallows failures of the group.

    Attributes:
        number: number of the attempt, from 1.
        completed: True after the block if no failure interrupted it, here or elsewhere.
        ended: True after the block if it ran to its end here.
    """

    def __init__(self, number: int, group: Group, mates: Alone = ALONE) -> None:
        self.number = number
        self.completed = self.ended = False
        self._group = group
        self._mates = mates
        self._stopped = False
        self._fault = group._core.mesh.fault
        self._barred = ""

    def __enter__(self) -> Attempt:
        self._barred = self._group._core.ban_reason
        if self._barred == BETWEEN_STEPS:
            self._group._core.ban_collectives("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.ended = error is None and not self._fault.failed
        if self.ended:
            try:
                self._group.barrier()
                self.completed = True
            except PacelineError as failure:
                error = failure
        if self.completed and self._mates.go(Point.BLOCK) is None:
            self.completed, self._stopped = False, True
        self._group._core.ban_collectives(self._barred)
        if self._stopped or (self._fault.failed and (error is None or isinstance(error, Exception))):
            _log.info("a block between steps was interrupted: %s", self.cause(error))
            return True
        return False

    def cause(self, error: BaseException | None = None) -> BaseException:
        """Returns what interrupted it."""
        if self._stopped and not self._fault.failed:
            return StepVoid("another rank of this replica has stopped in a block between steps")
        return error or self._fault.error()


def attempts(loop: TrainingLoop | None, group: Group, mates: Alone = ALONE) -> Iterator[Attempt]:
    """Yields attempts until one completes; see `Session.retry`."""
    if loop is not None and loop.overtaken:
        return
    failures = FailedAttempts()
    if loop is None or loop.done or loop.left:  # nothing would run the block again
        mates = ALONE
    while True:
        attempt = Attempt(failures.begin(_WHAT, group._core.mesh.peers), group, mates)
        yield attempt
        if not attempt.completed:
            if loop is None or loop.done or loop.left:
                raise attempt.cause()
            failures.add(_WHAT, attempt.cause(), group._core.mesh.peers)
            outcome = loop.retry()
            if outcome is BlockOutcome.OVERTAKEN:
                return
            attempt.completed = outcome is BlockOutcome.PASSED and attempt.ended
        if attempt.completed:
            if loop is not None:
                loop.block_done()
            return
