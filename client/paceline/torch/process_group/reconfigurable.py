"""A process group whose members are chosen again and again: torch's interface for fault tolerance, from 2.15 on.

    dist.init_process_group("paceline", enable_reconfigure=True)
    handles = ...                                # everybody's dist._get_reconfigure_handle(), by any way
    dist._reconfigure(uuid, handles).wait()      # from here on the group is just these

Each generation is a Paceline job of its own, and the member in the first place coordinates it: its handle says where.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch._C import _distributed_c10d as c10d  # torch before 2.15 has less in it
from torch.distributed import distributed_c10d

from paceline import Group
from paceline._fork import protect
from paceline._loop import loop_thread
from paceline.config import Config
from paceline.embedded import coordinator
from paceline.errors import (
    CoordinatorUnreachable,
    InvalidRank,
    LinkUnavailable,
    OperationTimeout,
    OrphanedError,
    PacelineError,
    PeerLost,
    PeerRaised,
    StaleGeneration,
    StepOrderError,
)
from paceline.links.fault import Fault, Suspicion, Verdict
from paceline.links.nowhere import NoMesh
from paceline.session.address import Endpoint, listening_host, parse_endpoint, reachable_endpoint
from paceline.session.join import connect, rules_of
from paceline.session.membership import Membership
from paceline.session.session import CoordinatedSession
from paceline.torch._torch_store import underlying
from paceline.torch._torch_work import Operation, seconds_of, told_to_torch
from paceline.torch.process_group import ProcessGroup
from paceline.torch.process_group.core import end
from paceline.torch.process_group.handles import Handle, Presence, PresenceWatcher
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Reconfigurable", "meeting_point"]

_log = logging.getLogger("paceline.torch")

_FIRST = "this process group has no members yet: call torch.distributed._reconfigure() first"
_ABORTED = "this process group was aborted: call torch.distributed._reconfigure() to go on"
_MEANWHILE = "this process aborted the process group while it was being reconfigured"

_LEAST_S = 0.1
"""For what is left to do, if members came, or were silent, until the last moment."""

_GOODBYE_S = 2.0
"""At the end, for members of earlier generations to take in what was sent to them."""


class Reconfigurable(ProcessGroup):
    """A process group without members until its first `reconfigure`.

    Args:
        rank: what `rank()` says until then.
        size: what `size()` says until then.
        timeout: seconds for operations that name none.
        meeting: an address that all members reach: this host's on the way there is where they reach this one.
    """

    def __init__(self, rank: int, size: int, timeout: float, meeting: Endpoint) -> None:
        self._before = (rank, size)
        self._meeting = meeting
        self._config = Config.from_environment()
        advertise = os.environ.get("PACELINE_ADVERTISE")
        # Without its port, which the members of before still have while the next ones are met.
        self._advertise = str(replace(parse_endpoint(advertise, default_port=0), port=0)) if advertise else None
        self._changing = threading.RLock()  # `reconfigure` and `abort` may be called at once, and both part
        super().__init__(self._nowhere(_FIRST), timeout, _nothing)
        self._presence = Presence()
        self._own: Handle | None = None
        self._cleanup = contextlib.ExitStack()
        self._used: set[int] = set()
        self._hooks: dict[int, Callable[[], None]] = {}
        self._aborts = 0
        self._joining: Callable[[PacelineError], None] | None = None
        self._leaving: list[tuple[threading.Thread, Fault]] = []

    def rank(self) -> int:
        """This process's rank among the members of now."""
        return self._group.rank if self._group.size else self._before[0]

    def size(self) -> int:
        """Number of members now."""
        return self._group.size or self._before[1]

    @property
    def supports_reconfigure(self) -> bool:
        """True."""
        return True

    @property
    def supports_abort_hooks(self) -> bool:
        """True."""
        return True

    @told_to_torch()
    def get_reconfigure_handle(self) -> str:
        """This member and its address, for the others to give to `reconfigure`; the same until `shutdown`.

        Raises:
            CoordinatorUnreachable: no way leads to torch's store or MASTER_ADDR, so this host's address towards others
                is not known.
            LinkUnavailable: the name in PACELINE_ADVERTISE does not resolve.
        """
        if self._own is None:
            here = loop_thread().run(reachable_endpoint(self._meeting, self._advertise, self._timeout, _say))
            host = listening_host(here, self._advertise)
            # No job here is ever taken up again, and no other coordinator takes the place of this one.
            own = coordinator(listen=str(Endpoint(host, 0)), for_good=True, keep_numbers=False)
            with contextlib.ExitStack() as opened:
                port = parse_endpoint(opened.enter_context(own)).port
                protect(id(self), listening_port=port, dialled=set())
                opened.callback(lambda: protect(id(self), listening_port=0, dialled=set()))
                loop_thread().run(self._presence.open(host))
                opened.callback(lambda: loop_thread().run(self._presence.close()))
                self._own = Handle(Endpoint(here.host, port), self._presence.door, self._presence.member)
                self._cleanup = opened.pop_all()
        return str(self._own)

    @told_to_torch()
    def reconfigure(self, opts: c10d.ReconfigureOptions) -> Operation:
        """Leaves the members of before, and goes on with those of the handles; returns when all have links.

        Args:
            opts: `uuid`, which no generation of this group has had; `handles`, one of each member: a list gives ranks
                by position, a set in the order of the texts; `timeout`.

        Raises:
            InvalidRank: this member's handle is not among them, or one is there twice.
            LinkUnavailable: some have an address of loopback, and others do not.
            ValueError: one is malformed.
            StaleGeneration: the uuid was used before.
            PeerLost: the process of a handle has gone, before or meanwhile; `ranks` are their positions.
            PeerRaised: this group was aborted meanwhile.
            OperationTimeout: some did not come in time.
        """
        handles = _in_order(opts.handles)
        own = Handle.parse(self.get_reconfigure_handle())
        if opts.uuid in self._used:
            raise StaleGeneration(f"uuid {opts.uuid} was already used by this process group: take a fresh one")
        if handles.count(own) != 1 or len(set(handles)) != len(handles):
            raise InvalidRank(f"each handle must be there once, and {own}, this member's, among them: {opts.handles}")
        _check_hosts(handles)
        deadline = time.monotonic() + (seconds_of(opts.timeout) or self._timeout)
        watcher, aborts = PresenceWatcher(handles), self._aborts
        try:
            gone = loop_thread().run(watcher.find_gone())
            if gone:
                raise _lost(opts.uuid, handles, gone)
            self._used.add(opts.uuid)
            self._part(_FIRST)  # what was sent to the members of before is still delivered
            self._meet(opts.uuid, handles, handles.index(own), watcher, deadline, aborts)
        finally:
            loop_thread().run(watcher.close())
        try:
            made = self._group  # an abort from here on has ended it, and put another in its place
            self._end_if_aborted(aborts)
            made.barrier(max(_LEAST_S, deadline - time.monotonic()))
        except BaseException:
            self._part(_FIRST)
            raise
        return Operation([], [], [], self._futures)

    def _meet(
        self, uuid: int, handles: list[Handle], rank: int, watcher: PresenceWatcher, deadline: float, aborts: int
    ) -> None:
        """Joins the job of this generation, at the coordinator of the first member."""
        config = replace(self._config, join_timeout=max(_LEAST_S, deadline - time.monotonic()))
        wanted = Membership(_job(uuid, handles), len(handles), len(handles), rank, rules_of(config))
        address = handles[0].address
        connection = connect(address, wanted, config, advertise=self._advertise, coordinator_returns=False)
        self._joining = connection.give_up
        try:
            self._end_if_aborted(aborts)
            loop_thread().run(watcher.begin(lambda gone: connection.give_up(_lost(uuid, handles, [gone]))))
            connection.open(config.join_timeout)
            session = CoordinatedSession(connection, config)
            self._take(session.group, session.leave)
        except (CoordinatorUnreachable, OrphanedError) as error:
            if time.monotonic() < deadline:
                raise _lost(uuid, handles, [0]) from error
            silent = f"rank 0 ({handles[0].address}), which coordinates, has not answered in time"
            raise OperationTimeout(f"reconfiguration {uuid}: {silent}") from error
        finally:
            self._joining = None

    def _end_if_aborted(self, aborts: int) -> None:
        """Does what `abort` could not do, for there was nothing yet, if it was called since there were so many."""
        if self._aborts != aborts:
            self._abort()
            raise PeerRaised(_MEANWHILE)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Has `abort` call a hook before it ends anything."""
        self._hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Undoes `register_abort_hook`."""
        self._hooks.pop(hook_id, None)

    def abort(self) -> None:
        """Ends what is under way with an error, here and at all other members; `reconfigure` goes on.

        Raises:
            Exception: what a hook raised; all others were called, and the group was aborted.
        """
        with contextlib.ExitStack() as then:
            then.callback(self._abort)
            for hook in reversed(list(self._hooks.values())):
                then.callback(hook)

    def _abort(self) -> None:
        raised = ErrorReason.ERROR_REASON_PEER_RAISED
        self._aborts += 1  # first: `reconfigure` looks at it behind each of the two below
        joining, mesh = self._joining, self._group.mesh
        if joining is not None:
            loop_thread().loop.call_soon_threadsafe(joining, PeerRaised(_MEANWHILE))
        if mesh.peers:
            me, operation = mesh.peers[mesh.rank], self._group.progress().operation
            word = f"{me} aborted the process group"
            mesh.fault.suspect(Suspicion(raised, None, operation, word))  # the others hear of it
            mesh.fault.settle(Verdict(mesh.generation, raised, (mesh.rank,), operation, word))  # nobody waits for them
        self._part(_ABORTED)

    def get_error(self) -> c10d.ErrorType:
        """What went wrong with the members of now, if anything did."""
        fault = self._group.mesh.fault
        error = fault.error() if fault.failed else None
        if error is None or isinstance(error, StepOrderError):  # it has no members
            return c10d.ErrorType.SUCCESS
        if isinstance(error, PeerRaised):
            return c10d.ErrorType.REMOTE_ERROR
        return c10d.ErrorType.TIMEOUT if isinstance(error, OperationTimeout) else c10d.ErrorType.COMM_ERROR

    def shutdown(self) -> None:
        """Leaves for good. Idempotent."""
        super().shutdown()
        deadline = time.monotonic() + _GOODBYE_S
        with self._changing:
            leaving, self._leaving = self._leaving, []
        for thread, fault in leaving:
            thread.join(max(0.0, deadline - time.monotonic()))
            text = "this member has left the process group"
            fault.settle(Verdict(fault.generation, ErrorReason.ERROR_REASON_SESSION_ENDED, (), 0, text))
            thread.join()
        self._cleanup.close()

    def _take(self, group: Group, on_shutdown: Callable[[], None]) -> None:
        with self._changing:
            super()._take(group, on_shutdown)
        ranks = distributed_c10d._world.pg_group_ranks
        if self in ranks:  # what DeviceMesh.from_group goes by; torch itself leaves it as it was
            ranks[self] = {rank: rank for rank in range(self.size())}

    def _part(self, reason: str) -> None:
        """Leaves the members of now, in a thread: nobody waits for what is left to say to those who have gone."""
        with self._changing:
            leave = self._on_shutdown
            if leave is None or not self._group.size:
                return
            thread = threading.Thread(
                target=end, args=(self._messenger, leave, self._futures), name="paceline-leaving", daemon=True
            )
            thread.start()
            alive = [other for other in self._leaving if other[0].is_alive()]
            self._leaving = [*alive, (thread, self._group.mesh.fault)]
            self._take(self._nowhere(reason), _nothing)

    def _nowhere(self, reason: str) -> Group:
        return Group(NoMesh(reason), self._config)


def meeting_point(store: c10d.Store) -> Endpoint:
    """Where all members meet: at torch's store if it has an address, else at MASTER_ADDR; loopback counts last.

    Args:
        store: as torch hands it over.
    """
    own, known = underlying(store), []
    if isinstance(own, c10d.TCPStore):
        known.append(Endpoint(own.host, own.port))
    known.append(Endpoint(os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))))
    return next((point for point in known if not point.is_loopback), known[0])


def _say(problem: str) -> None:
    """Why this member's address is not known yet."""
    _log.warning("no handle yet: %s", problem)


def _nothing() -> None:
    """Nothing is to be left by a group without members."""


def _in_order(handles: set[str] | Sequence[str]) -> list[Handle]:
    return [Handle.parse(text) for text in (sorted(handles) if isinstance(handles, set) else handles)]


def _check_hosts(handles: Sequence[Handle]) -> None:
    """Raises `LinkUnavailable` if some are on loopback, where only members of the same host could reach them."""
    local = [rank for rank, handle in enumerate(handles) if handle.address.is_loopback]
    if local and len(local) < len(handles):
        rank = local[0]
        raise LinkUnavailable(
            f"rank {rank} has a handle with an address of loopback ({handles[rank].address}), and other ranks are on "
            "other hosts, which do not reach that: before init_process_group on its host, set MASTER_ADDR to the "
            "address of a host that all reach, or PACELINE_ADVERTISE to its own"
        )


def _lost(uuid: int, handles: Sequence[Handle], gone: Sequence[int]) -> PeerLost:
    names = ", ".join(f"rank {rank} ({handles[rank].address})" for rank in gone)
    return PeerLost(
        f"reconfiguration {uuid}: the process that was to be {names} has gone: leave its handle out", ranks=tuple(gone)
    )


def _job(uuid: int, handles: Sequence[Handle]) -> str:
    """Members that were given other handles under the same number are in another job."""
    return f"reconfigure.{uuid}.{hashlib.sha256(repr(handles).encode()).hexdigest()[:16]}"
