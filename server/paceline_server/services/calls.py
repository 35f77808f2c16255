"""What open calls take of the memory, counted for whoever pays for them; and who waits for room.

Before a request is read there must be room for the longest that may come, for grpc takes it in whole, whichever method
it is for. For that calls wait, payers in turn, and it is free again when the request is in. So it has a budget of its
own: whoever has no room for another call is refused, and a burst of calls shall not be.

Calls that last leave their payer room for one that does not: a key that a thousand wait for can be set.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from paceline_server.budget import Budget
from paceline_server.errors import NoRoom

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
        # Who waits, by payer; the payer whose turn is next comes first.
        self._lines: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()

    @contextmanager
    def one(self, payer: str, lasts: bool = False) -> Iterator[OpenCall]:
        """A call, for as long as it is open.

        Args:
            payer: who pays for it, in words.
            lasts: it may be open for as long as it likes.

        Raises:
            NoRoom: the payer has too many.
        """
        call = OpenCall(self, payer)
        call.take(CALL_BYTES, CALL_BYTES + self._room if lasts else 0)
        try:
            yield call
        finally:
            self._open.add(payer, -call.held)

    def take(self, payer: str, size: int, spare: int) -> None:
        """See `OpenCall.take`."""
        budget = self._open
        if not budget.take(payer, size, spare):
            held, used, total = (each >> 20 for each in (budget.held(payer), budget.used, budget.total))
            raise NoRoom(
                f"the open calls of {payer} take {held} MiB of the coordinator's memory, and all together {used} of "
                f"{total} MiB: as much as they may; give it more memory if so many workers are meant to call"
            )

    @asynccontextmanager
    async def room(self, payer: str) -> AsyncIterator[None]:
        """Waits until a request may come in; there is room for it in the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(payer, OrderedDict())[turn] = None
        self._serve()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():
                self._drop(payer, turn)
            else:  # though it may have been cancelled when its turn had come
                self._reading.add(payer, -self._room)
            self._serve()

    def _serve(self) -> None:
        """Gives room to as many as there is room for, payers in turn."""
        full = 0  # payers in a row who have as much as they may
        while full < len(self._lines) and self._reading.has_for_others(self._room):
            payer, line = next(iter(self._lines.items()))
            self._lines.move_to_end(payer)
            turn = next(iter(line))
            if not turn.cancelled():
                if not self._reading.take(payer, self._room):
                    full += 1
                    continue
                turn.set_result(None)
            self._drop(payer, turn)
            full = 0

    def _drop(self, payer: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(payer)
        if line is not None:
            line.pop(turn, None)
            if not line:
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

    def take(self, size: int, spare: int = 0) -> None:
        """It takes so many bytes more, if so many are left to its payer besides.

        Raises:
            NoRoom: that is more than its payer may have.
        """
        self._calls.take(self._payer, size, spare)
        self.held += size

    def take_message(self, size: int) -> None:
        """A request or an answer of so many bytes is there, however slowly it goes.

        Raises:
            NoRoom: there is no room for it.
        """
        self.take(_TIMES * size)

    def room(self) -> AbstractAsyncContextManager[None]:
        """See `OpenCalls.room`."""
        return self._calls.room(self._payer)
