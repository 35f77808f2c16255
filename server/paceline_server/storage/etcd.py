"""A storage that several coordinators share, of which one leads: each batch of changes proves that it still does.

A batch is one swap of the leader's record (`shared_keys`): it makes the changes and writes the record again, if nobody
has written the record since. So batches form a chain. A batch without an answer is sent again: if the first copy was
stored, the second is refused, and the record shows this epoch and the batch's own number. Any other record means that
another coordinator leads now.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline_server.errors import NotLeader
from paceline_server.storage.base import Change, KeySet, StateUnusable, StoredJob, ViewFormed
from paceline_server.storage.job_records import (
    FORMAT,
    JOBS,
    check_format,
    emptied_by,
    format_of_ours,
    jobs_of,
    touched_by,
    value_of,
)
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.shared_keys import Item, KeysRefused, KeysUnavailable, LeaderRecord, SharedKeys

_log = logging.getLogger(__name__)

TICK_S = 0.25
"""Seconds after which an idle leader stores an empty batch."""

FENCE_S = 1.0
"""Seconds without a stored batch after which the leader gives up, and a standby tries to take over."""

_PAUSE_S = 0.02
_MOST_CHANGES, _MOST_BYTES = 40, 1 << 20
"""The most changes and bytes in one batch. A change has 3 keys at most; etcd takes 128 operations and 1.5 MB."""

_VIEW_BYTES = 300_000
"""Bytes that a view counts for: about what one of 2,000 members takes."""


def leader_key(prefix: str) -> bytes:
    """Returns the key of the leader's record."""
    return f"{prefix}/leader".encode()


def format_key(prefix: str) -> bytes:
    """Returns the key of the format of the state."""
    return f"{prefix}/{FORMAT}".encode()


class _Write:
    """Changes that are stored together, and the future of their caller."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = tuple(changes)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        return sum(_size(change) for change in self.changes)

    @property
    def empties(self) -> list[str]:
        return [prefix for change in self.changes if (prefix := emptied_by(change)) is not None]

    def end(self, error: Exception | None) -> None:
        if self.done.done():  # its caller has been cancelled
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def _size(change: Change) -> int:
    match change:
        case KeySet(_, _, value):
            return len(value)
        case ViewFormed():
            return _VIEW_BYTES
        case _:
            return 500


class EtcdStorage:
    """The state for as long as one coordinator leads: one epoch.

    `keys` is closed by its creator. `record` is the leader's, as this coordinator wrote it at `revision`. `on_deposed`
    is called once, with a sentence, as soon as this coordinator knows that it leads no longer; no write is answered
    before. `tick_s` and `fence_s` replace `TICK_S` and `FENCE_S`.
    """

    def __init__(
        self,
        keys: SharedKeys,
        prefix: str,
        record: LeaderRecord,
        revision: int,
        on_deposed: Callable[[str], None] = lambda _: None,
        *,
        tick_s: float = TICK_S,
        fence_s: float = FENCE_S,
    ) -> None:
        self.epoch = record.epoch
        self._keys = keys
        self._prefix = prefix
        self._record = record
        self._revision, self._held = revision, record.to_bytes()
        self._on_deposed = on_deposed
        self._tick_s, self._fence_s = tick_s, fence_s
        self._jobs = MemoryStorage()  # what is stored, with the batch that is being stored
        self._waiting: deque[_Write] = deque()
        self._wake = asyncio.Event()
        self._stored_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._ending = self._deposed = False
        self._format: dict[bytes, bytes] = {}  # what the next batch says of the format of the state

    def begin(self) -> None:
        """Begins to show that this coordinator leads, also while it does not serve yet; `load` does so, too."""
        if self._task is None:
            self._stored_at = asyncio.get_running_loop().time()
            self._task = asyncio.ensure_future(self._run())
            self._task.add_done_callback(self._has_ended)

    async def load(self) -> list[StoredJob]:
        """Reads all jobs. They are of one moment only if `confirm` returns afterwards."""
        self.begin()
        key, ours = format_key(self._prefix), format_of_ours()
        try:
            item = await self._keys.get(key)
            if item is not None:
                check_format(item.value)
            await self._read()
        except (OSError, ValueError) as error:
            raise StateUnusable(f"cannot use the state in etcd: {error}") from None
        if item is None or item.value != ours:
            self._format = {key: ours}
        return copy.deepcopy(list(self._jobs.jobs.values()))

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        """Queues changes for the next batch. The future has a `NotLeader` if this coordinator leads no longer."""
        write = _Write(changes)
        if self._deposed or self._ending:
            write.end(NotLeader("this coordinator leads no longer"))
        else:
            self._waiting.append(write)
            self._wake.set()
        return write.done

    async def confirm(self) -> None:
        """Returns once a batch is stored that began after this call, so this coordinator led meanwhile."""
        await self.write(())

    @property
    def is_sure(self) -> bool:
        """True if a batch was stored so recently that no standby has tried to take over yet."""
        return not self._deposed and asyncio.get_running_loop().time() - self._stored_at < self._fence_s

    async def resign(self) -> None:
        """Stores what is queued, and then a record without an address: a standby takes over at once."""
        await self._end(resigned=True)

    async def close(self) -> None:
        """Stores what is queued, and ends; the record stays."""
        await self._end(resigned=False)

    async def _end(self, *, resigned: bool) -> None:
        task, self._task = self._task, None
        self._ending = True
        if task is None:
            return
        self._wake.set()
        await asyncio.gather(task, return_exceptions=True)
        if resigned and not self._deposed:
            self._record = replace(self._record, address="")
            await self._store([])

    async def _read(self) -> None:
        prefix = f"{self._prefix}/{JOBS}"
        self._jobs = MemoryStorage(jobs_of(await self._keys.read(prefix.encode()), prefix))

    async def _run(self) -> None:
        while not self._deposed:
            if not self._waiting:
                if self._ending:
                    return
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._tick_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            batch = self._take()
            try:
                await self._store(batch)
            except Exception as error:
                self._depose(batch, f"the task that stores has failed: {error!r}")
                raise

    def _take(self) -> list[_Write]:
        """Takes the writes of the next batch: one that empties prefixes is a batch of its own."""
        batch: list[_Write] = []
        changes = size = 0
        while self._waiting:
            write = self._waiting[0]
            changes, size = changes + len(write.changes), size + write.size
            if batch and (changes > _MOST_CHANGES or size > _MOST_BYTES or write.empties):
                break
            batch.append(self._waiting.popleft())
            if write.empties:
                break
        return batch

    async def _store(self, batch: list[_Write]) -> None:
        try:
            await self._swap(batch)
        except KeysRefused as error:
            await self._after_refusal(batch, error)
        except _Deposed as deposed:
            self._depose(batch, str(deposed))
        else:
            for write in batch:
                write.end(None)

    async def _after_refusal(self, batch: list[_Write], error: OSError) -> None:
        """Stores writes one by one after a batch was refused, since one of them is to blame."""
        self._record = replace(self._record, batch=self._record.batch + 1)  # no two batches have one number
        try:
            await self._repeat(self._read)
        except (_Deposed, OSError, ValueError) as read_error:  # etcd may refuse us now, or hold data of another program
            self._depose(batch, str(read_error))
            return
        if len(batch) == 1:
            batch[0].end(OSError(f"cannot write the state: {error}"))
        else:
            for write in batch:
                if self._deposed:
                    write.end(NotLeader("this coordinator leads no longer"))
                else:
                    await self._store([write])
        if not batch:  # an empty batch was refused, so nothing can be stored
            self._depose(batch, str(error))

    async def _swap(self, batch: list[_Write]) -> None:
        """Stores a batch, and repeats it until it is known whether it is stored.

        Raises `KeysRefused` if it cannot be stored, and `_Deposed`.
        """
        touched: dict[str, None] = {}
        for write in batch:
            for change in write.changes:
                touched.update(dict.fromkeys(touched_by(change)))
                self._jobs.take(change)
        empties = [f"{self._prefix}/{prefix}".encode() for write in batch for prefix in write.empties]
        changes = {f"{self._prefix}/{name}".encode(): value_of(name, self._jobs.jobs) for name in touched}
        changes |= self._format
        record = replace(self._record, batch=self._record.batch + 1)
        held = self._held

        async def swap() -> None:
            began = asyncio.get_running_loop().time()
            key, value = leader_key(self._prefix), record.to_bytes()
            found = await self._keys.swap(key, self._revision, value, changes, empties, held)
            if isinstance(found, int):
                self._revision = found
            elif isinstance(found, Item) and found.value == value:  # an earlier copy, whose answer was lost
                self._revision = found.revision
            else:
                raise _Deposed(_who_leads(found))
            self._record, self._held, self._stored_at = record, value, began

        await self._repeat(swap)
        self._format = {}

    async def _repeat(self, call: Callable[[], object]) -> None:
        """Makes a call until the store answers; raises `_Deposed` once another coordinator may lead."""
        tries = 0
        loop = asyncio.get_running_loop()
        while True:
            try:
                await call()  # type: ignore[misc]  # a coroutine function
            except KeysUnavailable as error:
                tries += 1
                # After this process was frozen the first try fails in any case.
                if tries > 1 and loop.time() - self._stored_at > self._fence_s:
                    raise _Deposed(
                        f"nothing could be stored for {loop.time() - self._stored_at:.1f} s: {error}"
                    ) from None
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        """Nobody leads whose batches have ended, whatever has ended them."""
        if task.cancelled():
            self._depose([], "the task that stores was cancelled")
        elif (error := task.exception()) is not None:
            _log.error("the task that stores has failed", exc_info=error)
            self._depose([], f"the task that stores has failed: {error!r}")

    def _depose(self, batch: Sequence[_Write], why: str) -> None:
        if not self._deposed:
            self._deposed = True
            self._on_deposed(why)
        for write in (*batch, *self._waiting):
            write.end(NotLeader("this coordinator leads no longer"))
        self._waiting.clear()


class _Deposed(Exception):
    """This coordinator leads no longer; the text says why."""


def _who_leads(found: Item | int | None) -> str:
    if not isinstance(found, Item):
        return "the record of the leader was deleted"
    try:
        record = LeaderRecord.from_bytes(found.value)
    except ValueError as error:
        return str(error)
    return f"{record.address or record.name} leads in epoch {record.epoch}"
