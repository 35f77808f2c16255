"""A storage in one SQLite file, on a thread of its own: a slow disk never blocks the event loop.

We use `synchronous=FULL`, because NORMAL may lose the last commits at a power failure, and a generation number would be
given out twice (I3); FULL costs 0.20 ms p50 here. The thread commits all waiting changes together, so a thousand store
writes do not cost a thousand syncs. The file is locked: two coordinators on one file are an error. The file holds what
jobs have stored, so only the coordinator's user may read it, from its first instant.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from paceline_server.storage import schema
from paceline_server.storage.base import Change, StateUnusable, StoredJob
from paceline_server.storage.checks import check_job
from pacelinepb.private_files import FileTooOpen, check_private

T = TypeVar("T")


class _Batch:
    """Changes that are stored together, and the future of their caller."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = tuple(changes)
        self.done: Future[None] = Future()
        # A waiting caller may be cancelled at its deadline; the queued changes are stored all the same.
        self.done.set_running_or_notify_cancel()


class SqliteStorage:
    """A state file, which is created if there is none, in a folder that exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._closed: Future[None] = Future()
        self._thread: threading.Thread | None = None

    async def load(self) -> list[StoredJob]:
        """Opens the file and returns all jobs."""
        loaded: Future[list[StoredJob]] = Future()
        loaded.set_running_or_notify_cancel()  # the caller may be cancelled; the thread goes on until `close`
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="paceline-state", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(loaded)

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        """Queues changes for the next commit."""
        batch = _Batch(changes)
        self._queue.put(batch)
        return asyncio.wrap_future(batch.done)

    async def confirm(self) -> None:
        """Returns at once: the lock on the file keeps other coordinators away."""

    @property
    def is_sure(self) -> bool:
        """Always true, as `confirm` says."""
        return True

    async def close(self) -> None:
        """Stores the queued changes and closes the file."""
        if self._thread is not None:
            self._queue.put(None)
            await asyncio.wrap_future(self._closed)
            self._thread.join()  # the thread has nothing left to do
            self._thread = None

    # On the thread ----------------------------------------------------------------------------------------------------

    def _run(self, loaded: Future[list[StoredJob]]) -> None:
        try:
            path = Path(os.path.realpath(self._path))  # SQLite puts its other files beside the real one
            _keep_private(path)
            # isolation_level None: we open transactions by hand, so that one holds a whole round of batches.
            with closing(sqlite3.connect(path, isolation_level=None, timeout=0.5)) as connection:
                schema.prepare(connection)
                jobs = schema.load(connection)
                for job in jobs:
                    check_job(job)
                loaded.set_result(jobs)
                while self._commit_round(connection):
                    pass
        except Exception as error:  # a damaged row may raise anything
            if loaded.done():
                raise
            loaded.set_exception(StateUnusable(f"cannot use the state file {self._path}: {_why_unusable(error)}"))
        finally:
            self._closed.set_result(None)

    def _commit_round(self, connection: sqlite3.Connection) -> bool:
        """Waits for a batch and commits it with all other waiting ones. Returns False when the storage has to close."""
        batches: list[_Batch] = []
        item = self._queue.get()
        while item is not None:
            batches.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
        if batches and not self._commit(connection, batches):
            for batch in batches:  # one of them is to blame, so commit each by itself
                self._commit(connection, [batch], is_last_try=True)
        return item is not None

    def _commit(self, connection: sqlite3.Connection, batches: list[_Batch], is_last_try: bool = False) -> bool:
        try:
            _in_transaction(connection, lambda: _apply_all(connection, batches))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a change, later ones must not wait for ever
            if is_last_try:
                for batch in batches:
                    batch.done.set_exception(OSError(f"cannot write the state file {self._path}: {error}"))
            return False
        for batch in batches:
            batch.done.set_result(None)
        return True


def _keep_private(path: Path) -> None:
    """Creates the file if there is none, for its user alone; SQLite gives its other files the same mode (os_unix.c).

    This function opens no existing file: closing the file would release SQLite's locks, if this process has them
    (https://www.sqlite.org/howtocorrupt.html, 2.2).
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    user = os.geteuid()
    for name in ("", "-wal", "-shm", "-journal"):
        file = path.with_name(path.name + name)
        try:
            status = os.stat(file)
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid == user and mode & 0o070 and not mode & 0o007:
            os.chmod(file, mode & 0o700)  # Kubernetes opens a volume's files to its fsGroup at each mount
            status = os.stat(file)
        check_private(file, status, user)


def _why_unusable(error: Exception) -> str:
    if isinstance(error, FileTooOpen):
        return str(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return "another coordinator is using it"
    return str(error) if isinstance(error, sqlite3.Error | schema.NotAStateFile) else f"it is damaged ({error})"


def _apply_all(connection: sqlite3.Connection, batches: list[_Batch]) -> None:
    for batch in batches:
        for change in batch.changes:
            schema.apply(connection, change)


def _in_transaction(connection: sqlite3.Connection, work: Callable[[], T]) -> T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work()
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result
