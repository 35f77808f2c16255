"""What open calls take of the coordinator's memory, counted for the payer of each.

A call costs `CALL_BYTES` from its first moment, which covers one message that is not complete yet: grpc holds it before
any handler sees it. Further messages of a request, and the answer, are counted as they come.

Calls that last leave their payer room for one that does not: a key that a thousand calls wait for can be set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline_server.budget import Budget
from paceline_server.errors import NoRoom

__all__ = ["CALL_BYTES", "OpenCall", "OpenCalls"]

CALL_BYTES = 48 << 10
"""Of an open call, whatever it does: a `Get` that waits takes some 27 KB, and grpc may have 16 KiB unread."""

_TIMES = 3
"""Copies of a request in memory: as it came, parsed, and as Python objects."""


class OpenCalls:
    """All open calls of a coordinator.

    Args:
        budget: the memory for them.
        longest: bytes of the longest request of all methods.
    """

    def __init__(self, budget: Budget, longest: int) -> None:
        self._budget = budget
        self._spare = CALL_BYTES + _TIMES * longest

    @contextmanager
    def one(self, payer: str, lasts: bool = False) -> Iterator[OpenCall]:
        """A call, for as long as it is open.

        Args:
            payer: the payer, in words.
            lasts: True for a call that may stay open without limit.

        Raises:
            NoRoom: the payer has too many.
        """
        call = OpenCall(self, payer)
        call.take(CALL_BYTES, self._spare if lasts else 0)
        try:
            yield call
        finally:
            self.free(payer, call.held)

    def take(self, payer: str, size: int, spare: int) -> None:
        """See `OpenCall.take`."""
        budget = self._budget
        if not budget.take(payer, size, spare):
            held, used, total = (each >> 20 for each in (budget.held(payer), budget.used, budget.total))
            raise NoRoom(
                f"the open calls of {payer} take {held} MiB of the coordinator's memory, and all together {used} of "
                f"{total} MiB: as much as they may; give it more memory if so many workers are meant to call"
            )

    def free(self, payer: str, size: int) -> None:
        """Gives back bytes that were taken."""
        self._budget.add(payer, -size)


class OpenCall:
    """A call that is open.

    Attributes:
        payer: the payer, in words.
        held: bytes that are counted for it.
    """

    def __init__(self, calls: OpenCalls, payer: str) -> None:
        self._calls = calls
        self.payer = payer
        self.held = 0

    def take(self, size: int, spare: int = 0) -> None:
        """Counts more bytes, if the payer has room for them and for `spare` bytes besides.

        Raises:
            NoRoom: that is more than its payer may have.
        """
        self._calls.take(self.payer, size, spare)
        self.held += size

    def give_back(self) -> None:
        """Stops counting the messages of the call, which have been dropped."""
        self._calls.free(self.payer, self.held - CALL_BYTES)
        self.held = CALL_BYTES

    def take_message(self, size: int) -> None:
        """Counts one message of a request, or an answer.

        Raises:
            NoRoom: there is no room for it.
        """
        self.take(_TIMES * size)
