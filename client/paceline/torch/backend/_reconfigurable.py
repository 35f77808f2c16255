"""A process group whose members can be replaced: torch's interface for fault tolerance, from 2.15 on.

    dist.init_process_group("paceline", enable_reconfigure=True)
    handles = ...                                # of all members, each from its own dist._get_reconfigure_handle()
    dist._reconfigure(uuid, handles).wait()      # from here on the group consists of these

Each generation is a separate Paceline job. The first member runs its coordinator, at the address in that member's
handle.
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

from torch._C import _distributed_c10d as c10d  # lacks ReconfigureOptions before torch 2.15
from torch.distributed import distributed_c10d

from paceline._base.addresses import CoordinatorAddresses, Endpoint, listening_host, parse_endpoint, reachable_endpoint
from paceline._base.embedded import coordinator
from paceline._base.processes import protect
from paceline._base.waits import loop_thread
from paceline._elastic.join import connect, rules_of
from paceline._elastic.session import CoordinatedSession
from paceline._group import Group
from paceline._links.fault import Fault, Suspicion
from paceline._links.nowhere import NoMesh
from paceline._session.identity import JoinRequest
from paceline.config import Config
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
from paceline.torch._compiling import never_traced
from paceline.torch.backend._handles import Handle, Presence, PresenceWatcher
from paceline.torch.backend._operation import Operation, raising_torch_errors, seconds_of
from paceline.torch.backend._process_group import ProcessGroup, close_group
from paceline.torch.backend._torch_store import unwrap_store
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.torch")

_NO_MEMBERS = "this process group has no members yet: call torch.distributed._reconfigure() first"
_ABORTED = "this process group was aborted: call torch.distributed._reconfigure() to continue"
_ABORTED_MEANWHILE = "this process aborted the process group while it was being reconfigured"

_LEAST_S = 0.1
"""The least timeout, in seconds, of the last steps of a reconfiguration, even if earlier ones have used up the time."""

_GOODBYE_S = 2.0
"""Seconds that `shutdown` waits for members of earlier generations to receive what was sent to them."""


@never_traced
class Reconfigurable(ProcessGroup):
    """A process group without members until its first `reconfigure`; until then it reports this rank and size.

    The timeout, in seconds, is for operations that have none of their own. All members can reach the meeting's
    address. Other members reach this one at the address that this host uses to connect there.
    """

    def __init__(self, rank: int, size: int, timeout: float, meeting: Endpoint) -> None:
        self._initial = (rank, size)
        self._meeting = meeting
        self._config = Config.from_environment()
        advertise = os.environ.get("PACELINE_ADVERTISE")
        # Leave out the port: links of the last generation still use it while links of the next one are made.
        self._advertise = str(replace(parse_endpoint(advertise, default_port=0), port=0)) if advertise else None
        self._changing = threading.RLock()  # `reconfigure` and `abort` may run together; both leave the members
        super().__init__(self._empty_group(_NO_MEMBERS), timeout, _do_nothing)
        self._presence = Presence()
        self._own: Handle | None = None
        self._cleanup = contextlib.ExitStack()
        self._used: set[int] = set()
        self._hooks: dict[int, Callable[[], None]] = {}
        self._aborts = 0
        self._joining: Callable[[PacelineError], None] | None = None
        self._leaving: list[tuple[threading.Thread, Fault]] = []

    def rank(self) -> int:
        """Returns this process's rank among the current members."""
        return self._group.rank if self._group.size else self._initial[0]

    def size(self) -> int:
        """Returns the current number of members."""
        return self._group.size or self._initial[1]

    @property
    def supports_reconfigure(self) -> bool:
        """True: torch asks before it calls `reconfigure`."""
        return True

    @property
    def supports_abort_hooks(self) -> bool:
        """True: torch asks before it calls `register_abort_hook`."""
        return True

    @raising_torch_errors()
    def get_reconfigure_handle(self) -> str:
        """Returns this member's handle, which all members pass to `reconfigure`; the same until `shutdown`.

        Raises:
            CoordinatorUnreachable: the address at which others reach this host is not known, because it has no route to
                torch's store or MASTER_ADDR.
            LinkUnavailable: the name in PACELINE_ADVERTISE does not resolve.
        """
        if self._own is None:
            here = loop_thread().run(reachable_endpoint(self._meeting, self._advertise, self._timeout, _log_problem))
            host = listening_host(here, self._advertise)
            # Jobs here do not resume after a restart, and no other coordinator replaces this one.
            started = coordinator(listen=str(Endpoint(host, 0)), for_good=True, keep_numbers=False)
            with contextlib.ExitStack() as opened:
                port = parse_endpoint(opened.enter_context(started)).port
                protect(id(self), listening_port=port, dialled=set())
                opened.callback(lambda: protect(id(self), listening_port=0, dialled=set()))
                loop_thread().run(self._presence.open(host))
                opened.callback(lambda: loop_thread().run(self._presence.close()))
                self._own = Handle(Endpoint(here.host, port), self._presence.port, self._presence.member)
                self._cleanup = opened.pop_all()
        return str(self._own)

    @raising_torch_errors()
    def reconfigure(self, opts: c10d.ReconfigureOptions) -> Operation:
        """Leaves the current members, and joins the handles' members; returns when all have links.

        Args:
            opts: `uuid`, which no earlier generation of this group has had; `handles`, one for each member, whose order
                gives the ranks (if they are a set, the order of the texts); `timeout`.

        Raises:
            InvalidRank: this member's handle is missing, or a handle is there twice.
            LinkUnavailable: some handles have a loopback address, and others do not.
            ValueError: a handle is malformed.
            StaleGeneration: the uuid was used before.
            PeerLost: members' processes have ended, before this call or during it; `ranks` are their positions.
            PeerRaised: this group was aborted during the call.
            OperationTimeout: some members did not join in time.
        """
        handles = _parse_handles(opts.handles)
        own = Handle.parse(self.get_reconfigure_handle())
        if opts.uuid in self._used:
            raise StaleGeneration(f"uuid {opts.uuid} was already used by this process group: use a new one")
        if handles.count(own) != 1 or len(set(handles)) != len(handles):
            raise InvalidRank(f"each handle must be given once, this member's ({own}) included: {opts.handles}")
        _check_hosts(handles)
        deadline = time.monotonic() + (seconds_of(opts.timeout) or self._timeout)
        watcher, aborts = PresenceWatcher(handles), self._aborts
        try:
            gone = loop_thread().run(watcher.find_gone())
            if gone:
                raise _lost(opts.uuid, handles, gone)
            self._used.add(opts.uuid)
            self._leave_members(_NO_MEMBERS)  # sent messages are still delivered
            self._join(opts.uuid, handles, handles.index(own), watcher, deadline, aborts)
        finally:
            loop_thread().run(watcher.close())
        try:
            group = self._group  # read before the check: a later abort ends this group, and replaces self._group
            self._raise_if_aborted(aborts)
            group.barrier(max(_LEAST_S, deadline - time.monotonic()))
        except BaseException:
            self._leave_members(_NO_MEMBERS)
            raise
        return Operation([], [], [], self._future_threads)

    def _join(
        self, uuid: int, handles: list[Handle], rank: int, watcher: PresenceWatcher, deadline: float, aborts: int
    ) -> None:
        """Joins the job of this generation, at the first member's coordinator."""
        config = replace(self._config, join_timeout=max(_LEAST_S, deadline - time.monotonic()))
        wanted = JoinRequest(_job_name(uuid, handles), len(handles), len(handles), rank, rules_of(config))
        address = handles[0].address
        joining = connect(
            CoordinatorAddresses([address]), wanted, config, advertise=self._advertise, coordinator_returns=False
        )
        self._joining = joining.give_up
        try:
            self._raise_if_aborted(aborts)
            loop_thread().run(watcher.watch(lambda gone: joining.give_up(_lost(uuid, handles, [gone]))))
            session = CoordinatedSession(joining.join(config.join_timeout), config)
            self._use_group(session.group, session.leave)
        except (CoordinatorUnreachable, OrphanedError) as error:
            if time.monotonic() < deadline:
                raise _lost(uuid, handles, [0]) from error
            silent = f"rank 0 ({handles[0].address}), the coordinator, has not answered in time"
            raise OperationTimeout(f"reconfiguration {uuid}: {silent}") from error
        finally:
            self._joining = None

    def _raise_if_aborted(self, aborts: int) -> None:
        """Aborts again and raises if `abort` was called since this count: that call may have had nothing to end."""
        if self._aborts != aborts:
            self._abort()
            raise PeerRaised(_ABORTED_MEANWHILE)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Makes `abort` call a hook before it ends anything."""
        self._hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Removes a hook."""
        self._hooks.pop(hook_id, None)

    def abort(self) -> None:
        """Makes all running operations fail on all members; after `reconfigure` the group works again.

        Raises:
            Exception: a hook raised it; all other hooks were called, and the group was aborted.
        """
        with contextlib.ExitStack() as then:
            then.callback(self._abort)
            for hook in reversed(list(self._hooks.values())):
                then.callback(hook)

    def _abort(self) -> None:
        raised = ErrorReason.ERROR_REASON_PEER_RAISED
        self._aborts += 1  # comes first, as `reconfigure` checks it after setting what the next line reads
        joining, mesh = self._joining, self._group._core.mesh
        if joining is not None:
            loop_thread().loop.call_soon_threadsafe(joining, PeerRaised(_ABORTED_MEANWHILE))
        if mesh.peers:
            me, operation = mesh.peers[mesh.rank], self._group._core.progress().operation
            text = f"{me} aborted the process group"
            mesh.fault.suspect(Suspicion(raised, None, operation, text))  # tells the other members
            mesh.fault.settle(
                Verdict(mesh.generation, raised, (mesh.rank,), operation, text)
            )  # ends waits on this member now, not after the others' answer
        self._leave_members(_ABORTED)

    def get_error(self) -> c10d.ErrorType:
        """Returns the sort of error that the current members had; SUCCESS if they had none."""
        fault = self._group._core.mesh.fault
        error = fault.error() if fault.failed else None
        if error is None or isinstance(error, StepOrderError):  # the group has no members
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

    def _use_group(self, group: Group, on_shutdown: Callable[[], None]) -> None:
        with self._changing:
            super()._use_group(group, on_shutdown)
        ranks = distributed_c10d._world.pg_group_ranks
        if self in ranks:  # DeviceMesh.from_group reads the table, and torch does not update it
            ranks[self] = {rank: rank for rank in range(self.size())}

    def _leave_members(self, reason: str) -> None:
        """Leaves the current members in a thread, because giving up messages to lost members may take long."""
        with self._changing:
            leave = self._on_shutdown
            if leave is None or not self._group.size:
                return
            thread = threading.Thread(
                target=close_group,
                args=(self._messenger, leave, self._future_threads),
                name="paceline-leaving",
                daemon=True,
            )
            thread.start()
            alive = [other for other in self._leaving if other[0].is_alive()]
            self._leaving = [*alive, (thread, self._group._core.mesh.fault)]
            self._use_group(self._empty_group(reason), _do_nothing)

    def _empty_group(self, reason: str) -> Group:
        """Returns a group without members, whose operations fail with a reason."""
        return Group(NoMesh(reason), self._config)


def meeting_point(store: c10d.Store) -> Endpoint:
    """Returns an address that all members can reach: torch's store's or MASTER_ADDR; loopback only if both are."""
    inner, known = unwrap_store(store), []
    if isinstance(inner, c10d.TCPStore):
        known.append(Endpoint(inner.host, inner.port))
    known.append(Endpoint(os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))))
    return next((endpoint for endpoint in known if not endpoint.is_loopback), known[0])


def _log_problem(problem: str) -> None:
    """Logs why this member's address, and thus its handle, is not known yet."""
    _log.warning("this member has no handle yet: %s", problem)


def _do_nothing() -> None:
    """Does nothing: there are no members to leave."""


def _parse_handles(handles: set[str] | Sequence[str]) -> list[Handle]:
    """Parses handles, whose order gives the ranks; if they are a set, the order of the texts does."""
    return [Handle.parse(text) for text in (sorted(handles) if isinstance(handles, set) else handles)]


def _check_hosts(handles: Sequence[Handle]) -> None:
    """Raises `LinkUnavailable` if some addresses are loopback ones, which members on other hosts cannot reach."""
    local = [rank for rank, handle in enumerate(handles) if handle.address.is_loopback]
    if local and len(local) < len(handles):
        rank = local[0]
        raise LinkUnavailable(
            f"the handle of rank {rank} has a loopback address ({handles[rank].address}), which ranks on other hosts "
            "cannot reach: on its host, before init_process_group, set MASTER_ADDR to the address of a host that all "
            "can reach, or PACELINE_ADVERTISE to an address of its own"
        )


def _lost(uuid: int, handles: Sequence[Handle], gone: Sequence[int]) -> PeerLost:
    """Returns the error for members whose processes have ended."""
    names = ", ".join(f"rank {rank} ({handles[rank].address})" for rank in gone)
    return PeerLost(
        f"reconfiguration {uuid}: the process that should become {names} has ended: leave out its handle",
        ranks=tuple(gone),
    )


def _job_name(uuid: int, handles: Sequence[Handle]) -> str:
    """Returns the name of a generation's job; other handles with the same uuid give another name."""
    return f"reconfigure.{uuid}.{hashlib.sha256(repr(handles).encode()).hexdigest()[:16]}"
