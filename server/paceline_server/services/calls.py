"""What open calls take of the memory, counted for whoever pays for them; and who waits for room.

Before a request is read there must be room for the longest that may come, for grpc takes it in whole, whichever method
it is for. For that calls wait, those of each payer in their order, and it is free again when the request is in. So it
has a budget of its own: whoever has no room for another call is refused, and a burst of calls shall not be.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

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
        open_: the budget of those that are open.
        reading: the budget of requests that are read.
        longest: bytes of the longest request of all methods.
    """

    def __init__(self, open_: Budget, reading: Budget, longest: int) -> None:
        self._open = open_
        self._reading = reading
        self._room = _TIMES * longest
        self._lines: dict[str, OrderedDict[asyncio.Future[None], None]] = {}

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
            self._open.add(payer, -call.held)

    def take(self, payer: str, size: int) -> None:
        """See `OpenCall.take`."""
        budget = self._open
        if not budget.take(payer, size):
            held, used, total = (each >> 20 for each in (budget.held(payer), budget.used, budget.total))
            raise LimitMet(
                f"the open calls of {payer} take {held} MiB of the coordinator's memory, and all together {used} of "
                f"{total} MiB: as much as they may"
            )

    @asynccontextmanager
    async def room(self, payer: str) -> AsyncIterator[None]:
        """Waits until a request may come in; there is room for it in the block."""
        line = self._lines.setdefault(payer, OrderedDict())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line[turn] = None
        self._serve(payer)
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # its turn may have come when it was cancelled
                self._reading.add(payer, -self._room)
            for waiting in list(self._lines):
                self._serve(waiting)

    def _serve(self, payer: str) -> None:
        line = self._lines[payer]
        while line:
            turn = next(iter(line))
            if not turn.cancelled():
                if not self._reading.take(payer, self._room):
                    return
                turn.set_result(None)
            del line[turn]
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

    def take_message(self, size: int) -> None:
        """A request or an answer of so many bytes is there, however slowly it goes.

        Raises:
            LimitMet: there is no room for it.
        """
        self.take(_TIMES * size)

    def room(self) -> AbstractAsyncContextManager[None]:
        """See `OpenCalls.room`."""
        return self._calls.room(self._payer)
