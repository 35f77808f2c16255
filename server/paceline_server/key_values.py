"""The key-value store of one job, and the calls that wait for keys.

`KeyValues` is pure: values, limits, and answers to repeated calls. A client that lost the answer repeats a call, which
must not change a key twice: another member may have changed it meanwhile. So the store keeps the last few answers of
each member, and a repeat gets the answer of the first call and changes nothing. An answer is stored with what the call
has changed; a call that has changed nothing may be made again after a restart. If they could not be stored, a repeat
stores them: the key as it is then, and the answer. The answers hold no values: a repeated `compare_set` returns the
value that it wanted to set if it had set it, and the present value if it had not.

Each answer has a slot, and a client has one call at a time for each slot (`call % 16`). So when a greater call comes,
the earlier one has an answer, or its client has given it up; a copy that arrives later is refused.

`Storeroom`, the shell around it, keeps a future for each call that waits, filed under its key and under its member. A
write to the key wakes it, and so does the end of the member's session or of the coordinator. Nothing polls.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from paceline_server.errors import BadRequest, LimitMet, Refused, TimedOut
from paceline_server.limits import Budget
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import AnswerKept, Change, KeyDeleted, KeySet

_INTEGER = re.compile(rb"-?[0-9]{1,19}", re.ASCII)
_INT64 = 1 << 63
_ANSWERS = 16
"""Answers kept for each member: a session has so many writes in flight at most (`store.proto`)."""

_KEY_BYTES = 200
"""Bytes that a key takes besides its text and its value: two objects, and an entry in a dict."""

Answers = Mapping[str, Mapping[int, tuple[int, int]]]
"""By member and slot: the call and its answer."""


class KeyValues:
    """Keys and values of a job, within limits. Methods that change something return the changes to store.

    `budget` is for the stores of all jobs. A `call` is unique in the session of its caller; 0 is a call that is never
    repeated. Methods raise `BadRequest` if a later call has the slot, and `LimitMet` if the value is too large or the
    store is full.
    """

    def __init__(
        self,
        job: str,
        settings: ServerSettings,
        budget: Budget,
        keys: Mapping[str, bytes],
        answers: Answers = MappingProxyType({}),
    ) -> None:
        self._job = job
        self._settings = settings
        self._budget = budget
        self._keys = dict(keys)
        self.deleted = 0
        budget.add(job, sum(_size(key, value) for key, value in self._keys.items()))
        self._answers = {member_id: dict(slots) for member_id, slots in answers.items()}
        self._unstored: dict[str, set[int]] = {}  # by member: calls whose answers could not be stored

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def get(self, key: str) -> bytes | None:
        """Returns the value; None if there is no such key."""
        return self._keys.get(key)

    def set(self, key: str, value: bytes, member_id: str = "", call: int = 0) -> list[Change]:
        """Sets a key."""
        known = self._known(member_id, call)
        if known is not None:
            return self._again(member_id, call, key, known)
        return [*self._put(key, value), *self._keep(member_id, call, 0)]

    def _put(self, key: str, value: bytes) -> list[Change]:
        limits = self._settings
        if len(value) > limits.max_value_bytes:
            raise LimitMet(f"a value has at most {limits.max_value_bytes} bytes, not {len(value)}")
        old = self._keys.get(key)
        if old is None and len(self._keys) >= limits.max_keys:
            raise LimitMet(f"the store of job {self._job!r} has {limits.max_keys} keys, the most that it takes")
        more = _size(key, value) - (_size(key, old) if old is not None else 0)
        if more <= 0:
            self._budget.add(self._job, more)
        elif not self._budget.take(self._job, more):
            raise LimitMet(
                f"the store of job {self._job!r} is full: it has {self._budget.held(self._job):,} bytes, the stores of "
                f"all jobs have {self._budget.used:,} of {self._budget.total:,}, and one may have at most as much as "
                "it leaves free"
            )
        self._keys[key] = value
        return [KeySet(self._job, key, value)]

    def delete(self, key: str, member_id: str = "", call: int = 0) -> tuple[bool, list[Change]]:
        """Deletes a key. Returns whether it was there."""
        known = self._known(member_id, call)
        if known is not None:
            return bool(known), self._again(member_id, call, key, known)
        old = self._keys.pop(key, None)
        if old is None:
            self._keep(member_id, call, False)
            return False, []
        self.deleted += 1
        self._budget.add(self._job, -_size(key, old))
        return True, [KeyDeleted(self._job, key), *self._keep(member_id, call, True)]

    def clear(self) -> None:
        """Deletes all keys, because the job is over."""
        self.deleted += len(self._keys)
        self._keys.clear()
        self._answers.clear()
        self._unstored.clear()
        self._budget.add(self._job, -self._budget.held(self._job))

    def add(self, member_id: str, call: int, key: str, amount: int) -> tuple[int, list[Change]]:
        """Adds to an integer; a missing key counts as 0. Returns the sum, which must fit into 64 bits."""
        known = self._known(member_id, call)
        if known is not None:
            return known, self._again(member_id, call, key, known)
        text = self._keys.get(key, b"0")
        if not _INTEGER.fullmatch(text):
            raise BadRequest(f"key {key!r} holds no integer, so nothing can be added to it")
        total = int(text) + amount
        if not -_INT64 <= total < _INT64:
            raise BadRequest(f"the sum at key {key!r} does not fit into 64 bits")
        changes = self._put(key, b"%d" % total)
        return total, [*changes, *self._keep(member_id, call, total)]

    def compare_set(
        self, member_id: str, call: int, key: str, expected: bytes | None, desired: bytes
    ) -> tuple[bool, bytes | None, list[Change]]:
        """Sets a key if it holds `expected` (None: if it is missing). Returns whether it did, and the value now."""
        known = self._known(member_id, call)
        if known:
            return True, desired, self._again(member_id, call, key, known)
        value = self._keys.get(key)
        if known is not None or value != expected:
            self._keep(member_id, call, False)
            return False, value, []
        changes = self._put(key, desired)
        return True, desired, [*changes, *self._keep(member_id, call, True)]

    def not_stored(self, member_id: str, call: int) -> None:
        """Notes that what a call has changed could not be stored: a repeat stores it."""
        if self._answers.get(member_id, {}).get(call % _ANSWERS, (0, 0))[0] == call != 0:
            self._unstored.setdefault(member_id, set()).add(call)

    def is_stored(self, member_id: str, call: int) -> bool:
        """Returns False if what a call has changed could not be stored."""
        return call not in self._unstored.get(member_id, ())

    def forget(self, member_id: str) -> bool:
        """Drops the answers of a member whose session has ended, as it repeats no calls; returns whether it had any."""
        self._unstored.pop(member_id, None)
        return self._answers.pop(member_id, None) is not None

    def _known(self, member_id: str, call: int) -> int | None:
        kept, answer = self._answers.get(member_id, {}).get(call % _ANSWERS, (0, 0))
        if kept > call > 0:
            raise BadRequest(f"call {call} is over: call {kept}, which has its slot, came later")
        return answer if call and kept == call else None

    def _again(self, member_id: str, call: int, key: str, answer: int) -> list[Change]:
        """Returns what a repeat has to store: nothing if the first try could be stored."""
        if self.is_stored(member_id, call):
            return []
        value = self._keys.get(key)
        change = KeyDeleted(self._job, key) if value is None else KeySet(self._job, key, value)
        return [change, *self._keep(member_id, call, answer)]

    def _keep(self, member_id: str, call: int, answer: int) -> list[Change]:
        if not call:
            return []
        slot = call % _ANSWERS
        slots = self._answers.setdefault(member_id, {})
        if unstored := self._unstored.get(member_id):
            unstored.discard(slots.get(slot, (0, 0))[0])
        slots[slot] = (call, answer)
        return [AnswerKept(self._job, member_id, slot, call, int(answer))]  # a bool would be stored as one


def _size(key: str, value: bytes) -> int:
    return _KEY_BYTES + len(key.encode()) + len(value)


_NAMED = 10
"""The most missing keys that a refusal names."""


class Storeroom:
    """The store of one job and the calls that wait in it; `written` is done once the last changes are durable."""

    def __init__(self, values: KeyValues) -> None:
        self.values = values
        self.written: asyncio.Future[None] | None = None
        self._by_key: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._by_member: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    @property
    def waiting(self) -> int:
        """The number of calls that wait."""
        return sum(len(futures) for futures in self._by_member.values())

    async def until_there(self, member_id: str, keys: Iterable[str], timeout: float) -> None:
        """Waits until all keys exist at one time.

        Raises `TimedOut` with the names of missing keys, or the refusal that `end` or `drain` was called with.
        """
        wanted, values = list(dict.fromkeys(keys)), self.values
        there, deleted = 0, values.deleted  # the first so many keys are there, unless one has been deleted since
        try:
            async with asyncio.timeout(timeout):
                while there < len(wanted):
                    if wanted[there] in values:
                        there += 1
                        continue
                    await self._changed(member_id, wanted[there])
                    if values.deleted != deleted:
                        there, deleted = 0, values.deleted
        except TimeoutError:
            lacking = [key for key in wanted if key not in values]
            if not lacking:  # the last of them came at this moment
                return
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
        """Wakes the calls that wait for a key, which has been set."""
        for future in self._by_key.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def end(self, member_id: str, refusal: Refused) -> bool:
        """Ends the waits of a member with `refusal`, as its session has ended; returns whether it had answers."""
        for future in self._by_member.pop(member_id, ()):
            if not future.done():
                future.set_exception(refusal)
        return self.values.forget(member_id)

    def drain(self, refusal: Refused) -> None:
        """Ends all waits."""
        for member_id in list(self._by_member):
            self.end(member_id, refusal)


def _discard(table: defaultdict[str, set[asyncio.Future[None]]], key: str, future: asyncio.Future[None]) -> None:
    if futures := table.get(key):
        futures.discard(future)
        if not futures:
            del table[key]
