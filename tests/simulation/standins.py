"""What the real modules get in place of clocks, threads, sockets and disks, for as long as a schedule runs.

Only names of modules are exchanged, so that the code above them is the real one. All are put back at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import greenlet
from simulation import files as simulated_files
from simulation.group import Group, Mesh
from simulation.links import LinkedGroup, LinkedMesh
from simulation.network import Stream, refusal, unavailable
from simulation.process import _Door, _Flight, _Sockets, _Store, _Whereabouts
from simulation.replicas import Timer
from simulation.threads import (
    SimulatedCondition,
    SimulatedEvent,
    SimulatedQueue,
    SimulatedTime,
    Thread,
    Waiters,
    current,
    new_thread,
)

from paceline._base import activity as _counters
from paceline._base import rpc as _rpc
from paceline._base import waits as _wait
from paceline._base import work as _work
from paceline._base.addresses import CoordinatorAddresses
from paceline._collectives import engine, exchange
from paceline._elastic import job_line, mates, recovery, saver, session, steps, waiting
from paceline._group import group as real_group
from paceline._group import group_core, wrapper_calls
from paceline._links import fault
from paceline._session import control, first_view, generations, identity, inbox, joining, line_client, member, view
from paceline_protocol import Process as Identity
from paceline_protocol.coordinator import ExitReported, Session
from paceline_protocol.messages import MemberList
from paceline_server import dispatcher, failover, timers
from paceline_server.errors import Refused
from paceline_server.storage.etcd import FENCE_S, EtcdStorage
from pacelinepb.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from simulation.coordinator import Coordinator
    from simulation.process import Process
    from simulation.world import World

__all__ = ["installed"]

_PULSE = 1.0
"""Seconds between two looks for a stall of the coordinator: 0.05 in real life, where they cost nobody anything."""


def _wait_for(latch: Any, timeout: float | None = None) -> bool:
    if not latch._is_set:
        if not hasattr(latch, "waiters"):
            latch.waiters = Waiters()
        latch.waiters.wait(timeout)
    return latch._is_set  # type: ignore[no-any-return]


def _set(latch: Any) -> None:
    latch._is_set = True
    if hasattr(latch, "waiters"):
        latch.waiters.wake()


def _process() -> Process:
    """Whose loop runs."""
    return asyncio.get_running_loop().process  # type: ignore[attr-defined, no-any-return]


def _here() -> Process:
    """Whose thread or loop runs."""
    thread = greenlet.getcurrent()
    return thread.process if isinstance(thread, Thread) else _process()


class _Thread:
    """`threading.Thread`, of the process whose thread makes it."""

    def __init__(self, *, target: Any, args: tuple[Any, ...] = (), name: str = "") -> None:
        self._thread = current().process.thread(target, *args)
        self.start, self.join, self.is_alive = self._thread.start, self._thread.join, self._thread.is_alive


class _Channel:
    """`CoordinatorChannel`."""

    def __init__(self, addresses: CoordinatorAddresses, failure_timeout: float, credentials: Any) -> None:
        self._addresses = addresses
        self.newest = self

    @property
    def host(self) -> str:
        return self._addresses.current.host

    async def renew(self, timeout: float, leader: str | None = None) -> None:
        self._addresses.turn(leader)

    async def call(self, make: Any) -> Any:
        return await make(self)

    async def close(self) -> None:
        pass


class _Calls:
    """The calls of a world's processes to the coordinator."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def open_stream(
        self, channel: Any, first: pb.SessionRequest, metadata: Any, timeout: float
    ) -> tuple[Any, pb.SessionResponse]:
        """See `connection.open_stream`."""
        process = _process()
        await asyncio.sleep(self._world.delay(0.001, 0.02))
        async with asyncio.timeout(max(0.1, timeout)):
            coordinator = self._world.coordinator_at(channel.host)
            await self._reach(process, coordinator)
            stream = process.stream = Stream(self._world, process, coordinator)
            try:
                await stream.write(pb.SessionRequest.FromString(first.SerializeToString()))
                answer = await stream.read()
            except BaseException:
                stream.cancel()
                raise
        if not isinstance(answer, pb.SessionResponse):
            raise unavailable("the stream ended")
        return stream, answer

    async def fetch_pages(
        self, channel: Any, job: str, formed: MemberList, deadline: float, known_sha256: bytes, position: int
    ) -> list[bytes]:
        """See `view._fetch_pages`: the answer may come late, behind what was said afterwards."""
        process, world = _process(), self._world
        pages: list[bytes] = []
        while len(pages) < formed.pages and not view._has_changes(pages):
            await asyncio.sleep(world.latency())
            try:
                async with asyncio.timeout(max(0.1, deadline - world.clock.now)):
                    coordinator = world.coordinator_at(channel.host)
                    await self._reach(process, coordinator, wait=True)
                    while coordinator.stalled:  # noqa: ASYNC110  of simulated time
                        await asyncio.sleep(0.1)
            except TimeoutError:
                raise unavailable("no answer") from None
            if not coordinator.up or not coordinator.serves:
                if not coordinator.up:
                    continue
                raise unavailable("a standby")
            known = known_sha256 if not pages else b""
            try:
                pages.append(coordinator.dispatcher.page(job, formed.generation, len(pages), known, position))
            except Refused as refused:
                raise refusal(refused) from None
            prompt, longest = (0.6, 9.0) if world.shape.late else (0.9, 2.5)
            await asyncio.sleep(world.latency() if world.rng.random() < prompt else world.delay(0.1, longest))
        return pages

    async def report_exit(self, channel: Any, request: pb.ReportExitRequest, **_: Any) -> None:
        """ReportExit of SessionService."""
        await asyncio.sleep(self._world.latency())
        coordinator = self._world.coordinator_at(channel.host)
        await self._reach(_process(), coordinator, wait=True)
        told = request.process
        gone = Identity(told.host, told.pid, told.boot_id, told.start_ticks, told.pid_namespace, told.node)
        coordinator.call("report_exit", request.job, ExitReported(gone, request.exit_code, request.found_gone))

    async def _reach(self, process: Process, coordinator: Coordinator, *, wait: bool = False) -> None:
        """Returns when the coordinator is there; waits if it is cut off, or if asked to."""
        world = self._world
        while True:
            if not world.network.reaches(process.name, coordinator.name):
                await asyncio.sleep(0.2)
            elif coordinator.up:
                return
            elif wait:
                await asyncio.sleep(0.2)
            else:
                raise unavailable("connection refused")


class _Knocks:
    """`probe_address.AddressProbes`: is anybody at that address?"""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner = world.starting  # whose dispatcher is made

    def watch(self, session: Session, _: Any, refused: Any) -> None:
        name = session.address.partition(":")[0]

        def look() -> None:
            there = [process for process in self._world.members if process.name == name]
            if self._world.network.reaches(name, self._owner.name) and not any(process.alive for process in there):
                refused()

        self._owner.loop.call_later(self._world.delay(0.001, 0.02), look)

    def ask(self, address: str, answered: Any) -> None:
        name = address.partition(":")[0]

        def look() -> None:
            there = [process for process in self._world.members if process.name == name and process.alive]
            runs = any(not process.frozen or process.busy for process in there)
            if runs and self._world.network.reaches(name, self._owner.name):
                answered()

        self._owner.loop.call_later(0.002, look)

    def close(self) -> None:
        pass


async def _nothing(*_: Any) -> None:
    pass


def _for_real_groups(time: SimulatedTime) -> list[tuple[Any, str, Any]]:
    """The names that real groups find below them, in place of imitations."""
    modules = (_work, _counters, group_core, real_group, wrapper_calls, engine, exchange)
    return [
        *((module, "monotonic", time.monotonic) for module in modules),
        (
            _work,
            "threading",
            SimpleNamespace(
                RLock=threading.RLock, Condition=SimulatedCondition, Thread=new_thread, current_thread=current
            ),
        ),
        (exchange, "threading", SimpleNamespace(Event=SimulatedEvent)),
        (steps, "machine_words", dict),  # they take longer than all else; and all run on one machine
        (member, "Group", LinkedGroup),
        (generations, "GrpcMesh", LinkedMesh),
        (job_line, "GrpcMesh", LinkedMesh),
    ]


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """The names that this world's processes find."""
    time, calls, peers = SimulatedTime(world), _Calls(world), world.peers
    chance = SimpleNamespace(Random=lambda: world.rng, uniform=world.rng.uniform)
    names: list[tuple[Any, str, Any]] = [
        *(
            (module, "time", time)
            for module in (fault, waiting, recovery, saver, line_client, control, member, first_view, joining, session)
        ),
        (_wait.Latch, "wait", _wait_for),
        (_wait.Latch, "set", _set),
        (waiting, "random", chance),
        (_rpc, "random", chance),
        (control, "open_stream", calls.open_stream),
        (control, "CoordinatorChannel", _Channel),
        (control, "check_tls", _nothing),
        (inbox, "queue", SimpleNamespace(SimpleQueue=SimulatedQueue, Empty=queue.Empty)),
        (saver, "threading", SimpleNamespace(Thread=_Thread)),
        (saver, "checkpoint", world.files),
        (saver, "damage_of", world.files.damage_of),
        (saver, "save_once", world.files.save_once),
        (saver, "fingerprint", world.files.fingerprint),
        (saver, "ShardedSaver", simulated_files.ShardedSaver),
        (saver, "save_sharded", simulated_files.save_sharded),
        (mates, "threading", SimpleNamespace(Timer=lambda *of: Timer(_here(), *of))),
        (steps, "_script", lambda: ""),
        (steps, "_drain_on_sigterm", lambda loop: None),
        (member, "Door", lambda *_: _Door(current().process)),
        (member, "Sockets", lambda *_: _Sockets()),
        (member, "Whereabouts", lambda *_: _Whereabouts(current().process.name)),
        (joining, "FlightLog", lambda *_: _Flight()),
        (member, "CoordinatorStore", lambda *_: _Store()),
        (member, "Group", Group),
        (member, "tell_launcher", lambda *_: None),
        (first_view, "tell_launcher", lambda *_: None),
        (view, "_fetch_pages", calls.fetch_pages),
        (view, "time", time),
        (
            line_client,
            "SessionServiceStub",
            lambda channel: SimpleNamespace(ReportExit=functools.partial(calls.report_exit, channel)),
        ),
        (identity, "os", world.proc),
        (identity, "socket", world.proc),
        (identity, "Path", world.proc.open),
        (generations, "GrpcMesh", Mesh),
        (job_line, "GrpcMesh", Mesh),
        (job_line, "take_state", peers.take_state),
        (job_line, "take_shards", peers.take_shards),
        (job_line, "out_of_reach", peers.out_of_reach),
        (job_line, "get_manifest", peers.get_manifest),
        (session, "atexit", SimpleNamespace(register=lambda _: None, unregister=lambda _: None)),
        (
            dispatcher,
            "secrets",
            SimpleNamespace(
                token_bytes=lambda n: world.number().to_bytes(n, "big"),
                token_hex=lambda _: f"m{world.number():05}",
                compare_digest=lambda one, other: one == other,
            ),
        ),
        (dispatcher, "AddressProbes", lambda **_: _Knocks(world)),
        (failover, "EtcdStorage", functools.partial(EtcdStorage, fence_s=1e9 if world.shape.unfenced else FENCE_S)),
        (failover, "secrets", SimpleNamespace(token_hex=lambda _: f"k{world.number()}")),
        (timers, "_PULSE", _PULSE),
        (_counters, "_MEASURED_S", 0.0),  # a schedule has few steps
    ]
    if world.shape.microbatches:
        names += _for_real_groups(time)
    before = [(where, name, getattr(where, name)) for where, name, _ in names]
    level = logging.root.manager.disable
    try:
        for where, name, value in names:
            setattr(where, name, value)
        if not world.tells:
            logging.disable(logging.CRITICAL)
        yield
    finally:
        logging.disable(level)
        for where, name, value in before:
            setattr(where, name, value)
