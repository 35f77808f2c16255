"""A process group whose members are chosen again and again: torch's interface for fault tolerance, from 2.15 on.

    dist.init_process_group("paceline", enable_reconfigure=True)
    handles = ...                                # everybody's dist._get_reconfigure_handle(), by any way
    dist._reconfigure(uuid, handles).wait()      # from here on the group is just these

Each generation is a Paceline job of its own, and the member in the first place coordinates it: its handle says where.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch._C import _distributed_c10d as c10d  # torch before 2.15 has less in it

from paceline import Group, join
from paceline._loop import loop_thread
from paceline.config import Config
from paceline.embedded import coordinator
from paceline.errors import InvalidRank, OperationTimeout, PeerLost, PeerRaised, StaleGeneration, StepOrderError
from paceline.links.fault import Suspicion, Verdict
from paceline.links.nowhere import NoMesh
from paceline.session.address import Endpoint, is_refused, listening_host, parse_endpoint, reachable_endpoint
from paceline.torch.errors import told_to_torch
from paceline.torch.process_group import ProcessGroup
from paceline.torch.process_group.core import end
from paceline.torch.work import Operation, seconds_of
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Reconfigurable"]

_SCHEME = "paceline://"
_FIRST = "this process group has no members yet: call torch.distributed._reconfigure() first"
_ABORTED = "this process group was aborted: call torch.distributed._reconfigure() to go on"
_PROBE_S = 1.0
"""For the members of a new generation to say that they are there; silence does not count against them."""


class _Handle(NamedTuple):
    """A member as others know it.

    Attributes:
        address: where its coordinator listens.
        member: told apart from any other member that ever had this address.
    """

    address: Endpoint
    member: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.address}/{self.member}"

    @classmethod
    def parse(cls, text: str) -> _Handle:
        address, slash, member = text.removeprefix(_SCHEME).partition("/")
        if not (text.startswith(_SCHEME) and slash and member.isalnum()):
            raise ValueError(f"{text!r:.100} is no handle of this backend, which are {_SCHEME}host:port/member")
        return cls(parse_endpoint(address), member)


class Reconfigurable(ProcessGroup):
    """A process group without members until its first `reconfigure`.

    Args:
        rank: what `rank()` says until then.
        size: what `size()` says until then.
        timeout: seconds for operations that name none.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self._before = (rank, size)
        self._config = Config.from_environment()
        super().__init__(self._nowhere(_FIRST), timeout, _nothing)
        self._own: _Handle | None = None
        self._cleanup = contextlib.ExitStack()
        self._used: set[int] = set()
        self._hooks: dict[int, Callable[[], None]] = {}
        self._leaving: list[threading.Thread] = []

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
            CoordinatorUnreachable: no way leads to MASTER_ADDR, so this host's address towards others is not known.
        """
        if self._own is None:
            near = Endpoint(os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1")))
            advertise = os.environ.get("PACELINE_ADVERTISE")
            here = loop_thread().run(reachable_endpoint(near, advertise, self._timeout))
            listen = Endpoint(listening_host(here, advertise), 0)
            port = parse_endpoint(self._cleanup.enter_context(coordinator(listen=str(listen)))).port
            self._own = _Handle(Endpoint(here.host, port), secrets.token_hex(8))
        return str(self._own)

    @told_to_torch()
    def reconfigure(self, opts: c10d.ReconfigureOptions) -> Operation:
        """Leaves the members of before, and goes on with those of the handles; returns when all of them are there.

        Args:
            opts: `uuid`, which no generation of this group has had; `handles`, one of each member: a list gives ranks
                by position, a set in the order of the texts; `timeout`.

        Raises:
            InvalidRank: this member's handle is not among them, or one is there twice.
            ValueError: one is malformed.
            StaleGeneration: the uuid was used before.
            PeerLost: the process of a handle has gone.
            OperationTimeout: some did not come in time.
        """
        handles = _in_order(opts.handles)
        own = self.get_reconfigure_handle()
        if opts.uuid in self._used:
            raise StaleGeneration(f"uuid {opts.uuid} was already used by this process group: take a fresh one")
        if handles.count(_Handle.parse(own)) != 1:
            raise InvalidRank(f"{own}, this member, must be among the {len(handles)} handles once, and is not")
        self._used.add(opts.uuid)
        self._part(_FIRST)  # what was sent to the members of before is still delivered
        timeout = seconds_of(opts.timeout) or self._timeout
        _check_alive(handles, opts.uuid)
        session = join(
            str(handles[0].address),
            job=f"reconfigure.{opts.uuid}",
            rank=handles.index(_Handle.parse(own)),
            world_size=len(handles),
            timeout=timeout,
            config=self._config,
        )
        self._take(session.group, session.leave)
        return Operation([], [], [], self._futures)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Has `abort` call a hook before it ends anything."""
        self._hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Undoes `register_abort_hook`."""
        self._hooks.pop(hook_id, None)

    def abort(self) -> None:
        """Ends what is under way with an error, here and at all other members; `reconfigure` goes on."""
        for hook in list(self._hooks.values()):
            hook()
        mesh = self._group.mesh
        if mesh.peers:
            me, operation = mesh.peers[mesh.rank], self._group.progress().operation
            word, raised = f"{me} aborted the process group", ErrorReason.ERROR_REASON_PEER_RAISED
            mesh.fault.suspect(Suspicion(raised, None, operation, word))  # the others hear of it
            mesh.fault.settle(
                Verdict(mesh.generation, raised, (mesh.rank,), operation, word)
            )  # nothing waits longer here
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
        for thread in self._leaving:
            thread.join()
        self._leaving.clear()
        self._cleanup.close()

    def _part(self, reason: str) -> None:
        """Leaves the members of now, in a thread: nobody waits for what is left to say to those who have gone."""
        leave = self._on_shutdown
        if leave is None or not self._group.size:
            return
        thread = threading.Thread(
            target=end, args=(self._messenger, leave, self._futures), name="paceline-leaving", daemon=True
        )
        thread.start()
        self._leaving = [*(other for other in self._leaving if other.is_alive()), thread]
        self._take(self._nowhere(reason), _nothing)

    def _nowhere(self, reason: str) -> Group:
        return Group(NoMesh(reason), self._config)


def _nothing() -> None:
    """Nothing is to be left by a group without members."""


def _in_order(handles: set[str] | Sequence[str]) -> list[_Handle]:
    return [_Handle.parse(text) for text in (sorted(handles) if isinstance(handles, set) else handles)]


def _check_alive(handles: Sequence[_Handle], uuid: int) -> None:
    """Asks at the address of each member whether anybody listens: a refusal is proof, and comes at once."""

    async def ask() -> list[bool]:
        return await asyncio.gather(*(is_refused(handle.address, _PROBE_S) for handle in handles))

    gone = [rank for rank, refused in enumerate(loop_thread().run(ask())) if refused]
    if gone:
        names = ", ".join(f"rank {rank} ({handles[rank].address})" for rank in gone)
        raise PeerLost(
            f"reconfiguration {uuid}: nobody listens any more where {names} was: leave that handle out",
            ranks=tuple(gone),
        )
