"""What open calls take of the memory, counted for whoever pays for them; and who waits for room.

Before a request is read there must be room for the longest that may come, for grpc takes it in whole, whichever method
it is for. For that calls wait, those of each payer in their order. Whoever has no room for another call is refused.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from paceline_server.budget import Budget
from paceline_server.errors import LimitMet

__all__ = ["CALL_BYTES", "OpenCall", "OpenCalls"]

CALL_BYTES = 32 << 10
"""Of an open call, whatever it does: a `Get` that waits takes some 27 KB, and grpc may have 16 KiB unread."""

_TIMES = 3
"""So many times a request is there: as it came, parsed, and as objects of Python."""


class OpenCalls:
    """All of a coordinator.

    Args:
        budget: what they may take.
        longest: bytes of the longest request of all methods.
    """

    def __init__(self, budget: Budget, longest: int) -> None:
        self._budget = budget
        self._lines: dict[str, OrderedDict[asyncio.Future[None], None]] = {}
        self.room = _TIMES * longest

    @contextmanager
    def one(self, payer: str) -> Iterator[OpenCall]:
        """A call, for as long as it is open.

        Args:
            payer: who pays for it, in words.

        Raises:
            LimitMet: the payer has too many.
        """
        call = OpenCall(self, payer)
        call.take(CALL_BYTES)
        try:
            yield call
        finally:
            self.give(payer, call.held)

    def take(self, payer: str, size: int) -> None:
        """See `OpenCall.take`."""
        if not self._budget.take(payer, size):
            held, used, total = (
                each >> 20 for each in (self._budget.held(payer), self._budget.used, self._budget.total)
            )
            raise LimitMet(
                f"the open calls of {payer} take {held} MiB of the coordinator's memory, and all together {used} of "
                f"{total} MiB: as much as they may"
            )

    def give(self, payer: str, size: int) -> None:
        """So many bytes are free again."""
        self._budget.add(payer, -size)
        for waiting in list(self._lines):
            self._serve(waiting)

    async def wait_for_room(self, payer: str) -> None:
        """Waits until `room` bytes are taken."""
        line = self._lines.setdefault(payer, OrderedDict())
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line[future] = None
        self._serve(payer)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # its turn had just come
                self.give(payer, self.room)
            raise

    def _serve(self, payer: str) -> None:
        line = self._lines[payer]
        while line:
            future = next(iter(line))
            if not future.cancelled():
                if not self._budget.take(payer, self.room):
                    return
                future.set_result(None)
            del line[future]
        del self._lines[payer]


class OpenCall:
    """A call that is open.

    Attributes:
        held: bytes that it takes.
    """

    def __init__(self, calls: OpenCalls, payer: str) -> None:
        self._calls = calls
        self._payer = payer
        self.held = 0

    def take(self, size: int) -> None:
        """It takes so many bytes more.

        Raises:
            LimitMet: that is more than its payer may have.
        """
        self._calls.take(self._payer, size)
        self.held += size

    async def wait_for_room(self) -> None:
        """Waits until a request may come in."""
        await self._calls.wait_for_room(self._payer)
        self.held += self._calls.room

    def came(self, size: int) -> None:
        """The request has come in, with so many bytes."""
        back = self._calls.room - _TIMES * size
        self.held -= back
        self._calls.give(self._payer, back)

    def goes(self, size: int) -> None:
        """An answer of so many bytes is to go out, however slowly it is read.

        Raises:
            LimitMet: there is no room for it.
        """
        self.take(_TIMES * size)
