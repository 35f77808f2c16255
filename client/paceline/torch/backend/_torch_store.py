"""Adapts the coordinator's store to torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline._elastic.session import Session
from paceline.errors import OperationTimeout

_KEY_COUNT = "paceline/keys"
"""Name of the key that holds the number of keys, for `num_keys`."""

_stores: set[Store] = set()
"""All open stores: torch keeps only the C++ part of a store, so the Python part would be freed."""


class Store(dist.Store):  # type: ignore[misc]  # torch has no types here
    """A job's key-value store as a torch.distributed store. Keys have up to 1,024 bytes, values up to 1 MiB.

    Timeouts are kept by torch, because a store in front of this one (PrefixStore) sets them there.

    Args:
        session: the session of the job.

    Attributes:
        session: as above.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        _stores.add(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        new, _ = self.session.store.compare_set(key, None, data)
        if new:
            self.session.store.add(_KEY_COUNT)
        else:
            self.session.store.set(key, data)

    def get(self, key: str) -> bytes:
        """Waits for a key, and returns its value.

        Raises:
            dist.DistStoreError: the key was not set in time.
        """
        try:
            return self.session.store.get(key, timeout=self.timeout.total_seconds())
        except OperationTimeout as error:
            raise dist.DistStoreError(str(error)) from error

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, and returns the sum."""
        new, _ = self.session.store.compare_set(key, None, b"0")
        if new:
            self.session.store.add(_KEY_COUNT)
        return self.session.store.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets a key if its value is `expected`, or if it is missing and `expected` is empty; returns the new value."""
        before, after = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        done, value = self.session.store.compare_set(key, before or None, after)
        if done and not before:
            self.session.store.add(_KEY_COUNT)
        return before if value is None else value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist.

        Raises:
            dist.DistStoreError: some keys were not set in time; the error names them.
        """
        seconds = (timeout or self.timeout).total_seconds()
        try:
            self.session.store.wait(list(keys), timeout=seconds)
        except OperationTimeout as error:
            raise dist.DistStoreError(str(error)) from error

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all keys exist."""
        try:
            self.session.store.wait(list(keys), timeout=0.0)
        except OperationTimeout:
            return False
        return True

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns False if it did not exist."""
        gone = self.session.store.delete(key)
        if gone:
            self.session.store.add(_KEY_COUNT, -1)
        return gone

    def num_keys(self) -> int:
        """Returns the number of keys that were set through this class."""
        return self.session.store.add(_KEY_COUNT, 0)

    deleteKey, getNumKeys = delete_key, num_keys

    def close(self) -> None:
        """Leaves the job."""
        _stores.discard(self)
        self.session.leave()


def unwrap_store(store: Any) -> Any:
    """Returns the store inside torch's prefixes, as the Python object if it is a `Store` of this process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return next((own for own in _stores if own is store), store)
