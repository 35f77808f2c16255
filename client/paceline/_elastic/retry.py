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
from paceline._elastic.training_loop import TrainingLoop
from paceline._group import Group
from paceline.errors import PacelineError

_log = logging.getLogger("paceline.elastic")

_WHAT = "a block between steps"


class Attempt:
    """One attempt at a block; a context manager that swallows failures of the group.

    Attributes:
        number: number of the attempt, from 1.
        completed: True after the block if no failure interrupted it, here or elsewhere.
        ended: True after the block if it ran to its end here.
    """

    def __init__(self, number: int, group: Group) -> None:
        self.number = number
        self.completed = self.ended = False
        self._group = group
        self._fault = group.mesh.fault
        self._barred = ""

    def __enter__(self) -> Attempt:
        self._barred = self._group.ban_reason
        if self._barred == BETWEEN_STEPS:
            self._group.ban_collectives("")
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
        self._group.ban_collectives(self._barred)
        if self._fault.failed and (error is None or isinstance(error, Exception)):
            _log.info("a block between steps was interrupted: %s", error or self._fault.error())
            return True
        return False


def attempts(loop: TrainingLoop | None, group: Group) -> Iterator[Attempt]:
    """Yields attempts until one completes; see `Session.retry`."""
    failures = FailedAttempts()
    while True:
        attempt = Attempt(failures.begin(_WHAT, group.mesh.peers), group)
        yield attempt
        if not attempt.completed:
            if loop is None or loop.done or loop.left:
                raise group.mesh.fault.error()
            failures.add(_WHAT, group.mesh.fault.error(), group.mesh.peers)
            outcome = loop.retry()
            if outcome is BlockOutcome.OVERTAKEN:
                return
            attempt.completed = outcome is BlockOutcome.PASSED and attempt.ended
        if attempt.completed:
            if loop is not None:
                loop.block_done()
            return
