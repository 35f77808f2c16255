"""`session.retry`: a block between two steps that changes no state, run again until no failure cuts it short."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType

from paceline.elastic.line import Line
from paceline.group import Group

__all__ = ["Attempt", "attempts"]

_log = logging.getLogger("paceline.elastic")


class Attempt:
    """One attempt; a context manager that swallows a failure of the group.

    Attributes:
        number: from 1.
        completed: True after the block if nothing cut it short.
    """

    def __init__(self, number: int, group: Group) -> None:
        self.number = number
        self.completed = False
        self._fault = group.mesh.fault

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.completed = error is None
        if isinstance(error, Exception) and self._fault.failed:
            _log.info("a block between steps is run again: %s", error)
            return True
        return False


def attempts(line: Line | None, group: Group) -> Iterator[Attempt]:
    """Attempts until one completes; see `Session.retry`."""
    number = 0
    while True:
        number += 1
        attempt = Attempt(number, group)
        yield attempt
        if attempt.completed:
            return
        if line is None or line.done:
            raise group.mesh.fault.error()
        line.retry()
