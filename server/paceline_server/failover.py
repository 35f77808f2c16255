"""One of several coordinators that share a state in etcd: it leads, or stands by to take over.

`election` decides when to try, the store decides who leads (`storage.etcd`), and this shell does what follows. It has
one `Coordinator` after the other at the same address: one that refuses callers while another process leads, and one
that serves the jobs for each epoch in which this process leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from paceline_server.app import Coordinator
from paceline_server.dispatcher import Observer
from paceline_server.election import LOOK_S, Election
from paceline_server.errors import NotLeader
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import StateUnusable
from paceline_server.storage.etcd import FENCE_S, EtcdStorage, format_key, leader_key
from paceline_server.storage.etcd_keys import EtcdKeys
from paceline_server.storage.job_records import check_format
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.shared_keys import Item, KeysRefused, KeysUnavailable, LeaderRecord, SharedKeys
from pacelinepb.private_files import FileTooOpen

_log = logging.getLogger(__name__)

_FIRST_LOOK_S = 10.0
"""Seconds in which etcd must answer when a coordinator starts."""

_CONNECT_S = 1.0


class Candidacy:
    """One process's part in the election: looks at the record, and tries to take over when `Election` says so.

    It looks every `look_s` seconds; `fence_s` is for `Election`.
    """

    def __init__(
        self,
        keys: SharedKeys,
        prefix: str,
        name: str,
        address: str,
        *,
        look_s: float = LOOK_S,
        fence_s: float = FENCE_S,
    ) -> None:
        self.election = Election(name, fence_s=fence_s)
        self._look_s = look_s
        self._keys = keys
        self._key = leader_key(prefix)
        self._format_key = format_key(prefix)
        self._name = name
        self._address = address
        self._woken = asyncio.Event()
        self._said: object = None  # what the last line of log was about
        self._trouble = ""
        self._held: bytes | None = None  # the record as it was read last

    def wake(self) -> None:
        """Has the record looked at now."""
        self._woken.set()

    async def win(self) -> tuple[LeaderRecord, int]:
        """Returns once this process leads: its record, and the revision at which it was written."""
        loop = asyncio.get_running_loop()
        while True:
            pause = self._look_s
            try:
                await self.look()
                decision = self.election.decide(loop.time())
                record = self.election.record
                about = decision.tries, None if record is None else record.epoch
                if about != self._said:
                    self._said = about
                    _log.info("%s", decision.why)
                if decision.tries:
                    won = await self._try()
                    self._trouble = ""
                    if won is not None:
                        return won
                    continue
                self._trouble = ""
                pause = max(0.0, min(pause, decision.due - loop.time()))
            except (KeysUnavailable, KeysRefused, StateUnusable) as error:
                if str(error) != self._trouble:  # a full etcd answers each look, and refuses each try
                    self._trouble = str(error)
                    _log.warning("%s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()
            self._woken.clear()

    async def look(self) -> None:
        """Reads the record.

        Raises `KeysUnavailable` or `KeysRefused` without an answer, and `StateUnusable` if the key holds something
        else.
        """
        self._note(await self._keys.get(self._key))

    async def check_format(self) -> None:
        """Checks that this release reads the state, or raises `StateUnusable`: otherwise it must not lead."""
        found = await self._keys.get(self._format_key)
        try:
            if found is not None:
                check_format(found.value)
        except ValueError as error:
            raise StateUnusable(f"cannot use the state in etcd: {error}") from None

    async def _try(self) -> tuple[LeaderRecord, int] | None:
        await self.check_format()
        election = self.election
        record = LeaderRecord(election.highest + 1, self._name, self._address)
        found = await self._keys.swap(self._key, election.revision, record.to_bytes(), held=self._held)
        if isinstance(found, int):
            self._note(Item(self._key, record.to_bytes(), found))
            return record, found
        self._note(found)
        return None

    def _note(self, found: Item | None) -> None:
        try:
            record = None if found is None else LeaderRecord.from_bytes(found.value)
        except ValueError as error:
            raise StateUnusable(f"cannot use the state in etcd: {error}") from None
        self._held = None if found is None else found.value
        self.election.saw(asyncio.get_running_loop().time(), record, 0 if found is None else found.revision)


async def follow(candidacy: Candidacy) -> None:
    """Holds a connection to the leader's address, to hear at once that its process has ended. Runs until cancelled.

    Nothing is said on the connection. The leader closes it after some seconds, and then another one is opened.
    """
    loop = asyncio.get_running_loop()
    while True:
        address = candidacy.election.leader
        host, _, port = address.rpartition(":")
        try:
            if address:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                candidacy.election.reached(address)
                try:
                    while await reader.read(1 << 12):
                        pass
                finally:
                    writer.close()
                candidacy.wake()
                continue
        except ConnectionRefusedError:
            candidacy.election.refused(loop.time(), address)
            candidacy.wake()
        except (OSError, ValueError):  # its host is away (TimeoutError is an OSError): silence proves nothing
            pass
        await asyncio.sleep(LOOK_S)


class FailoverCoordinator:
    """Leads or stands by, until it is stopped. Started once and stopped once, as a `Coordinator`.

    `settings.etcd` names the shared state. `make` makes what serves, and `notice` hears of the end of a leader: the
    simulation replaces both, and tests replace `keys`.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        keys: SharedKeys | None = None,
        observer: Observer | None = None,
        make: Callable[..., Coordinator] = Coordinator,
        notice: Callable[[Candidacy], Coroutine[Any, Any, None]] = follow,
    ) -> None:
        assert settings.etcd is not None
        self.http_url = ""
        self._settings = settings
        self._prefix = settings.etcd.prefix
        self._keys: SharedKeys = keys or EtcdKeys(settings.etcd)
        self._observer = observer
        self._make = make
        self._notice = notice
        self._name = secrets.token_hex(8)
        self._coordinator: Coordinator | None = None
        self._candidacy: Candidacy | None = None
        self._storage: EtcdStorage | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def start(self) -> str:
        """Serves, first as a standby; returns and raises what `Coordinator.start` does."""
        try:
            await self._first_look()
            address = await self._serve(MemoryStorage(), 0)
        except BaseException:
            await self._keys.close()
            raise
        self._settings = replace(self._settings, listen=address, http=_bound(self._settings.http, self.http_url))
        self._candidacy = Candidacy(self._keys, self._prefix, self._name, self._settings.reached_at)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._ended.set())
        return address

    async def stop(self, grace: float = 1.0) -> None:
        """Stops; a leader resigns first, so that a standby takes over at once."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._coordinator is not None:
            self._coordinator.drain()  # nothing is decided that could not be stored any more
        if self._storage is not None:
            await self._storage.resign()
        if self._coordinator is not None:
            await self._coordinator.stop(grace)
        await self._keys.close()
        self._ended.set()

    async def wait_for_termination(self) -> None:
        """Waits until the coordinator has ended; raises what has ended it, if it has ended by itself."""
        await self._ended.wait()
        if self._task is not None:
            await self._task

    async def _first_look(self) -> None:
        probe = Candidacy(self._keys, self._prefix, self._name, "")
        give_up = asyncio.get_running_loop().time() + _FIRST_LOOK_S
        while True:
            try:
                await probe.look()
                await probe.check_format()
                return
            except KeysUnavailable as error:
                if asyncio.get_running_loop().time() >= give_up:
                    raise StateUnusable(f"cannot use the state in etcd: {error}") from None
                await asyncio.sleep(LOOK_S)
            except StateUnusable:
                raise
            except (OSError, FileTooOpen) as error:  # it refuses us, or a file for TLS cannot be used
                raise StateUnusable(f"cannot use the state in etcd: {error}") from None

    async def _serve(self, storage: MemoryStorage | EtcdStorage, epoch: int) -> str:
        """Replaces the coordinator that serves; one without an epoch is a standby."""
        if self._coordinator is not None:
            await self._coordinator.stop(0)
        standby = None if epoch else self._refusal
        observer = self._observer if epoch else None
        self._coordinator = coordinator = self._make(
            self._settings, storage=storage, observer=observer, epoch=epoch, standby=standby
        )
        address = await coordinator.start()
        self.http_url = coordinator.http_url
        return address

    def _refusal(self) -> NotLeader:
        leader = "" if self._candidacy is None else self._candidacy.election.leader
        return NotLeader(
            f"this coordinator is a standby: {leader} leads" if leader else "no coordinator leads at this moment",
            leader,
        )

    async def _run(self) -> None:
        assert self._candidacy is not None
        while True:
            following = asyncio.create_task(self._notice(self._candidacy))
            try:
                record, revision = await self._candidacy.win()
            finally:
                following.cancel()
            deposed = asyncio.Event()
            pause = 0.0
            try:
                await self._lead(record, revision, deposed)
            # The state cannot be read, or a file of TLS or of tokens; or another coordinator leads already.
            except (OSError, ValueError, NotLeader) as error:
                _log.warning("could not serve in epoch %d: %s", record.epoch, error)
                pause = FENCE_S  # so that another coordinator tries first
            await self._stand_by()
            await asyncio.sleep(pause)

    async def _lead(self, record: LeaderRecord, revision: int, deposed: asyncio.Event) -> None:
        """Serves the jobs until another coordinator leads, or may lead."""

        def on_deposed(why: str) -> None:
            _log.warning("this coordinator leads no longer: %s", why)
            if self._coordinator is not None:
                self._coordinator.drain()
            deposed.set()

        storage = EtcdStorage(self._keys, self._prefix, record, revision, on_deposed)
        self._storage = storage
        storage.begin()
        await self._serve(storage, record.epoch)
        _log.info("this coordinator leads in epoch %d", record.epoch)
        await deposed.wait()

    async def _stand_by(self) -> None:
        storage, self._storage = self._storage, None
        if storage is not None:
            await storage.close()
        while True:
            try:
                await self._serve(MemoryStorage(), 0)
                return
            except (OSError, ValueError) as error:  # its port is taken, or a file cannot be used now
                _log.warning("cannot stand by: %s", error)
                await asyncio.sleep(LOOK_S)


def _bound(http: str | None, url: str) -> str | None:
    """Returns the address at which the page is served, with its port."""
    return None if http is None else url.split("://", 1)[1].rstrip("/")


def make_coordinator(settings: ServerSettings) -> Coordinator | FailoverCoordinator:
    """Makes the coordinator that the settings ask for."""
    return Coordinator(settings) if settings.etcd is None else FailoverCoordinator(settings)
