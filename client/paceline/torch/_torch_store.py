"""The coordinator as torch.distributed's store, and `init_method="paceline://host:7400/job"`: ranks meet there too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from paceline import Session, join
from paceline.errors import OperationTimeout

__all__ = ["SCHEME", "Store", "rendezvous", "underlying"]


_COUNT = "paceline/keys"
"""How many keys there are, for `num_keys`."""

_stores: set[Store] = set()
"""All that are open: torch keeps their C++ half alone, and what is defined here would be gone with the other."""


class Store(dist.Store):  # type: ignore[misc]  # torch has no types here
    """A job's key-value store, as torch.distributed wants one. Keys up to 1,024 bytes, values up to 1 MiB.

    Args:
        session: of the job.

    Attributes:
        session: as given.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._seconds: float | None = None
        _stores.add(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """For `get` and `wait` that name none."""
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """See `set_timeout`."""
        return timedelta(seconds=self._seconds if self._seconds is not None else 300.0)

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        new, _ = self.session.store.compare_set(key, None, data)
        if new:
            self.session.store.add(_COUNT)
        else:
            self.session.store.set(key, data)

    def get(self, key: str) -> bytes:
        """The value of a key, waiting for it.

        Raises:
            dist.DistStoreError: it was not set in time.
        """
        try:
            return self.session.store.get(key, timeout=self.timeout.total_seconds())
        except OperationTimeout as error:
            raise dist.DistStoreError(str(error)) from error

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, and returns the sum."""
        new, _ = self.session.store.compare_set(key, None, b"0")
        if new:
            self.session.store.add(_COUNT)
        return self.session.store.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets a key that holds `expected` (empty: that is missing); returns what it holds afterwards."""
        before, after = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        done, value = self.session.store.compare_set(key, before or None, after)
        if done and not before:
            self.session.store.add(_COUNT)
        return before if value is None else value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist.

        Raises:
            dist.DistStoreError: some did not appear in time; the text names them.
        """
        seconds = (timeout or self.timeout).total_seconds()
        try:
            self.session.store.wait(list(keys), timeout=seconds)
        except OperationTimeout as error:
            raise dist.DistStoreError(str(error)) from error

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys exist."""
        try:
            self.session.store.wait(list(keys), timeout=0.0)
        except OperationTimeout:
            return False
        return True

    def delete_key(self, key: str) -> bool:
        """Deletes a key; False if it was not there."""
        gone = self.session.store.delete(key)
        if gone:
            self.session.store.add(_COUNT, -1)
        return gone

    def num_keys(self) -> int:
        """Number of keys that were set by way of this class."""
        return self.session.store.add(_COUNT, 0)

    deleteKey, getNumKeys = delete_key, num_keys

    def close(self) -> None:
        """Leaves the job."""
        _stores.discard(self)
        self.session.leave()


def underlying(store: Any) -> Any:
    """The store below torch's prefixes, as this process made it; what it is given if it is another's."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return next((own for own in _stores if own is store), store)


SCHEME = "paceline"


def rendezvous(url: str, timeout: timedelta = timedelta(seconds=300), **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Joins the job that a URL names, and yields (store, rank, world size).

    Ranks are as `init_process_group` or the URL says (`?rank=0&world_size=2`), else given out by the coordinator:
    then `world_size` alone, or PACELINE_MIN_WORKERS, tells how many there are to be.

    Args:
        url: paceline://HOST:PORT/JOB; without host or job the environment's are taken.
        timeout: to wait for all ranks.

    Raises:
        ValueError: the URL is malformed.
        PacelineError: the job cannot be joined; the text says why.
    """
    parts = urlparse(url)
    query = {name: int(values[-1]) for name, values in parse_qs(parts.query).items()}
    unknown = query.keys() - {"rank", "world_size"}
    if unknown:
        raise ValueError(f"{url}: there is no {sorted(unknown)}; write paceline://host:port/job?rank=0&world_size=2")
    rank, world = (None if query.get(name, -1) == -1 else query[name] for name in ("rank", "world_size"))
    if rank is not None and world is None:
        raise ValueError(f"{url}: a rank needs a world_size")
    session = join(
        parts.netloc or None,
        job=parts.path.strip("/") or None,
        rank=rank,
        world_size=world if rank is not None else None,
        min_workers=world if rank is None else None,
        timeout=timeout.total_seconds(),
    )
    store = Store(session)
    store.set_timeout(timeout)
    yield store, session.rank, session.size
