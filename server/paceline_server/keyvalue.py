"""The key-value store of one job: values, limits, and answers to repeated calls. Pure: no waiting, no disk.

A call that changes by what is there (`add`, `compare_set`) may be repeated by a client that lost the answer; the last
few answers of each member are kept, so that a repeat is answered as the first was and changes nothing. No value is kept
with them: a repeat has the one that it wanted to set, or lost to.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping

from paceline_server.budget import Budget
from paceline_server.errors import BadRequest, LimitMet
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import Change, KeyDeleted, KeySet

__all__ = ["KeyValues"]

_INTEGER = re.compile(rb"-?[0-9]{1,19}", re.ASCII)
_INT64 = 1 << 63
_ANSWERS = 8
"""Answers kept for each member: as many calls may be in flight in one session when its connection breaks."""

_KEY_BYTES = 200
"""That a key takes besides its text and its value: two objects, and a place in a dict."""

_Answer = int | bool


class KeyValues:
    """Keys and values of a job. Methods that change something return what is to be stored.

    Args:
        job: its name.
        settings: limits.
        budget: the bytes for the stores of all jobs.
        keys: what is there already.
    """

    def __init__(self, job: str, settings: ServerSettings, budget: Budget, keys: Mapping[str, bytes]) -> None:
        self._job = job
        self._settings = settings
        self._budget = budget
        self._keys = dict(keys)
        budget.add(job, sum(_size(key, value) for key, value in self._keys.items()))
        self._answers: dict[str, OrderedDict[int, _Answer]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def get(self, key: str) -> bytes | None:
        """The value, None if the key is not there."""
        return self._keys.get(key)

    def set(self, key: str, value: bytes) -> list[Change]:
        """Sets a key.

        Raises:
            LimitMet: the value is too large, or the store is full.
        """
        limits = self._settings
        if len(value) > limits.max_value_bytes:
            raise LimitMet(f"a value has at most {limits.max_value_bytes} bytes, not {len(value)}")
        old = self._keys.get(key)
        if old is None and len(self._keys) >= limits.max_keys:
            raise LimitMet(f"the store of job {self._job!r} has {limits.max_keys} keys, as many as it takes")
        more = _size(key, value) - (_size(key, old) if old is not None else 0)
        if more <= 0:
            self._budget.add(self._job, more)
        elif not self._budget.take(self._job, more):
            raise LimitMet(
                f"the store of job {self._job!r} is full: it has {self._budget.held(self._job):,} bytes, those of all "
                f"jobs {self._budget.used:,} of {self._budget.total:,}, and one has at most as much as it leaves free"
            )
        self._keys[key] = value
        return [KeySet(self._job, key, value)]

    def delete(self, key: str) -> list[Change]:
        """Deletes a key; no change if it is not there."""
        old = self._keys.pop(key, None)
        if old is None:
            return []
        self._budget.add(self._job, -_size(key, old))
        return [KeyDeleted(self._job, key)]

    def clear(self) -> None:
        """The job is over: its keys are gone."""
        self._keys.clear()
        self._budget.add(self._job, -self._budget.held(self._job))

    def add(self, member_id: str, call: int, key: str, amount: int) -> tuple[int, list[Change]]:
        """Adds to an integer; a missing key counts as 0. Returns the sum.

        Raises:
            BadRequest: the value is no integer, or the sum does not fit into 64 bits.
            LimitMet: the store is full.
        """
        known = self._known(member_id, call)
        if known is not None:
            return known, []
        text = self._keys.get(key, b"0")
        if not _INTEGER.fullmatch(text):
            raise BadRequest(f"key {key!r} holds no integer, so nothing can be added to it")
        total = int(text) + amount
        if not -_INT64 <= total < _INT64:
            raise BadRequest(f"the sum at key {key!r} does not fit into 64 bits")
        changes = self.set(key, b"%d" % total)
        self._remember(member_id, call, total)
        return total, changes

    def compare_set(
        self, member_id: str, call: int, key: str, expected: bytes | None, desired: bytes
    ) -> tuple[bool, bytes | None, list[Change]]:
        """Sets a key if it holds `expected` (None: if it is missing). Returns whether it did, and the value now.

        Raises:
            LimitMet: the value is too large, or the store is full.
        """
        known = self._known(member_id, call)
        if known:
            return True, desired, []
        value = self._keys.get(key)
        if known is not None or value != expected:
            self._remember(member_id, call, False)
            return False, value, []
        changes = self.set(key, desired)
        self._remember(member_id, call, True)
        return True, desired, changes

    def forget(self, member_id: str) -> None:
        """The member's session has ended: its answers are not asked for again."""
        self._answers.pop(member_id, None)

    def _known(self, member_id: str, call: int) -> _Answer | None:
        return self._answers.get(member_id, OrderedDict()).get(call)

    def _remember(self, member_id: str, call: int, answer: _Answer) -> None:
        answers = self._answers.setdefault(member_id, OrderedDict())
        answers[call] = answer
        if len(answers) > _ANSWERS:
            answers.popitem(last=False)


def _size(key: str, value: bytes) -> int:
    return _KEY_BYTES + len(key.encode()) + len(value)
