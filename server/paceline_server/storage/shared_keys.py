"""The contract of a key-value store that several coordinators share, and who leads among them: the leader's record.

`etcd_keys` implements it. The one transaction is a swap: if the guarded key was last written at the revision that the
caller names, and has the value that the caller knows, then all changes are made, and that key gets its next value;
otherwise nothing happens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol


class KeysUnavailable(OSError):
    """The store has not answered; nobody knows whether it did what it was asked to do."""


class KeysRefused(OSError):
    """The store has refused a request for good, and has done nothing: the request is too large, or its disk is full."""


@dataclass(frozen=True, slots=True)
class Item:
    """A key with its value, and the revision of the store at which it was written last."""

    key: bytes
    value: bytes
    revision: int


class SharedKeys(Protocol):
    """The store. All reads are linearizable. Methods raise `KeysUnavailable` or `KeysRefused`."""

    async def get(self, key: bytes) -> Item | None:
        """Returns a key; None if it is missing."""
        ...

    async def read(self, prefix: bytes) -> list[Item]:
        """Returns all keys that begin with `prefix`, sorted."""
        ...

    async def swap(
        self,
        key: bytes,
        revision: int,
        value: bytes,
        changes: Mapping[bytes, bytes | None] | None = None,
        emptied: Sequence[bytes] = (),
        held: bytes | None = None,
    ) -> int | Item | None:
        """Sets `key` and makes the changes if `key` was last written at `revision`, 0 if there must be none.

        A change to None deletes its key. All keys that begin with a prefix in `emptied` are deleted, too; none in
        `changes` begins with one. With `held` the key must have that value besides: a store that was restored from a
        backup counts its revisions anew, so that one revision may stand for two values.

        Returns the revision of the change; or, if nothing was changed, the guarded key as it is, None if it is missing.
        """
        ...

    async def close(self) -> None:
        """Ends all connections."""
        ...


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The value of the guarded key: which coordinator leads.

    `epoch` grows by 1 with each takeover. `name` is unique for each coordinator process. `address` is empty once it has
    resigned. `batch` is how many batches it has stored in this epoch.
    """

    epoch: int
    name: str
    address: str
    batch: int = 0

    def to_bytes(self) -> bytes:
        """Returns the record as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaderRecord:
        """Reads a record; raises ValueError if the key belongs to another program."""
        try:
            read = json.loads(data)
            epoch, name, address, batch = read["epoch"], read["name"], read["address"], read["batch"]
        except (ValueError, TypeError, KeyError):
            raise ValueError("the key of the leader's record holds something else") from None
        if not (type(epoch) is type(batch) is int and isinstance(name, str) and isinstance(address, str) and epoch > 0):
            raise ValueError("the key of the leader's record holds something else")
        return cls(epoch, name, address, batch)
