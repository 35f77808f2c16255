"""A job's key-value store with the calls that wait for keys. The shell around `keyvalue`; nothing polls.

A call that waits is one future, filed under its key and under its member: a write to the key wakes it, and so does the
end of the member's session or of the coordinator.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from paceline_server.errors import Refused, TimedOut
from paceline_server.keyvalue import KeyValues

__all__ = ["Storeroom"]

_NAMED = 10
"""Missing keys that a refusal names, at most."""


class Storeroom:
    """The store of one job and the calls that wait in it.

    Args:
        values: the store.
    """

    def __init__(self, values: KeyValues) -> None:
        self.values = values
        self._by_key: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._by_member: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return sum(len(futures) for futures in self._by_member.values())

    async def until_there(self, member_id: str, keys: Iterable[str], timeout: float) -> None:
        """Waits until all keys exist at one time.

        Args:
            member_id: the member that waits.
            keys: the keys.
            timeout: seconds.

        Raises:
            TimedOut: some keys are missing; the text names them.
            Refused: the one that `end` or `drain` was called with.
        """
        wanted = list(dict.fromkeys(keys))
        try:
            async with asyncio.timeout(timeout):
                while missing := next((key for key in wanted if key not in self.values), None):
                    await self._changed(member_id, missing)
        except TimeoutError:
            lacking = [key for key in wanted if key not in self.values]
            named = ", ".join(repr(key) for key in lacking[:_NAMED])
            more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
            raise TimedOut(f"not set within {timeout:g} s: {named}{more}") from None

    async def _changed(self, member_id: str, key: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._by_key[key].add(future)
        self._by_member[member_id].add(future)
        try:
            await future
        finally:
            _discard(self._by_key, key, future)
            _discard(self._by_member, member_id, future)

    def wake(self, key: str) -> None:
        """The key has been set."""
        for future in self._by_key.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def end(self, member_id: str, refusal: Refused) -> None:
        """The member's session has ended: its waits end with `refusal`, its answers are forgotten."""
        for future in self._by_member.pop(member_id, ()):
            if not future.done():
                future.set_exception(refusal)
        self.values.forget(member_id)

    def drain(self, refusal: Refused) -> None:
        """Ends all waits."""
        for member_id in list(self._by_member):
            self.end(member_id, refusal)


def _discard(table: defaultdict[str, set[asyncio.Future[None]]], key: str, future: asyncio.Future[None]) -> None:
    if futures := table.get(key):
        futures.discard(future)
        if not futures:
            del table[key]
