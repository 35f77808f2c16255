"""The store that a c10d process group reads and writes while it opens: it holds the contacts of all ranks.

A rank first writes what others need to reach it, and then reads what they have written. What it has written by then is
its contact (`DataEngine.contact`); the group tells contacts over links, and the store answers with all ranks' contacts.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline._base.waits import Outcome
from paceline.engines import EngineFailed


class ContactStore(dist.Store):  # type: ignore[misc]  # torch has no types here
    """The contacts of one group in one generation; `mine` is this rank's.

    With `tells_at_once` the first write is the whole contact, because the rank that writes may never read: NCCL's rank
    0 writes the unique id, and waits in NCCL for the others.
    """

    def __init__(self, rank: int, *, tells_at_once: bool = False) -> None:
        super().__init__()
        self.mine: Outcome[bytes] = Outcome()
        self._rank = rank
        self._tells_at_once = tells_at_once
        self._written: dict[str, bytes] = {}
        self._all: Outcome[dict[str, bytes]] = Outcome()
        self._lock = threading.Lock()

    def more(self, written: bytes) -> dict[str, Any]:
        """Returns what goes into the contact beside the keys; called once, with all that was written."""
        del written
        return {}

    def read_more(self, told: Mapping[str, Any]) -> None:
        """Reads what another rank's `more` returned; ValueError, TypeError or KeyError if it cannot be read."""

    def meet(self, contacts: Sequence[bytes]) -> None:
        """Takes the contacts of all ranks."""
        values: dict[str, bytes] = {}
        try:
            for rank, contact in enumerate(contacts):
                told = json.loads(contact)
                values |= {str(key): bytes.fromhex(value) for key, value in told["keys"].items()}
                if rank != self._rank:
                    self.read_more(told)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.stop(f"a contact cannot be read: {error!r}")
            return
        with self._lock:
            if not self._all.done():
                self._all.set_result(values)

    def stop(self, why: str) -> None:
        """Ends all waits."""
        with self._lock:
            for outcome in (self.mine, self._all):
                if not outcome.done():
                    outcome.set_exception(EngineFailed(why))

    # Called by torch.

    def set(self, key: str, value: str | bytes) -> None:
        """Notes what this rank tells the others."""
        if self.mine.done():
            raise RuntimeError(f"{key!r} was told after the contact was made")
        self._written[key] = value.encode() if isinstance(value, str) else bytes(value)
        if self._tells_at_once:
            self._publish()

    def get(self, key: str) -> bytes:
        """Waits for a key, and returns its value."""
        self.wait([key])
        return self._written[key] if key in self._written else self._all.result()[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        del timeout  # the fault of the generation ends the wait
        if all(key in self._written for key in keys):
            return
        self._publish()
        self._all.wait()
        missing = [key for key in keys if key not in self._written and key not in self._all.result()]
        if missing:
            raise dist.DistStoreError(f"no rank has told {missing}")

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all keys exist."""
        known = self._all.result() if self._all.done() else {}
        return all(key in self._written or key in known for key in keys)

    def _publish(self) -> None:
        """Makes the contact from what was written."""
        keys = {key: value.hex() for key, value in self._written.items()}
        contact = {"keys": keys, **self.more(b"".join(self._written.values()))}
        with self._lock:
            if not self.mine.done():
                self.mine.set_result(json.dumps(contact).encode())
