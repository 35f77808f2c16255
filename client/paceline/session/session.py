"""The user's session: a member's place in a job, from `join` to `leave`."""

from __future__ import annotations

import abc
import atexit
import logging
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from paceline import errors
from paceline._fork import check_process
from paceline.config import Config
from paceline.group import Group
from paceline.links.base import Peer
from paceline.links.local import local_meshes
from paceline.session.store import MemoryStore, Store

if TYPE_CHECKING:
    from paceline.session.member import MemberConnection

__all__ = ["CoordinatedSession", "Session", "SoloSession"]

MAX_NAME_BYTES = 256
"""Longest name of a barrier (session.proto)."""

_log = logging.getLogger("paceline.session")


class Session(abc.ABC):
    """A live registration. Made by `paceline.join`; a context manager that leaves at its end.

    Attributes:
        job: name of the job.
        group: the object that collectives are called on; one for the session's life.
        store: the job's key-value store.
    """

    job: str
    group: Group
    store: Store

    @property
    def rank(self) -> int:
        """This member's rank in the current view."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of members in the current view."""
        return self.group.size

    @property
    def generation(self) -> int:
        """Number of the current view; it only grows."""
        return self.group.generation

    @property
    @abc.abstractmethod
    def members(self) -> Sequence[Peer]:
        """The members of the current view in rank order."""

    @abc.abstractmethod
    def barrier(self, name: str, *, timeout: float | None = None) -> None:
        """Waits until every member of the view has called it with this name, as often as this member has.

        Args:
            name: 1 to 256 bytes.
            timeout: seconds; None for `call_timeout`. A coordinator that is away has 5 s more to come back and answer.

        Raises:
            OperationTimeout: some did not arrive; the text lists who is missing (rank, host, since when).
            PeerLost: a member was lost; the text names it.
        """

    @abc.abstractmethod
    def leave(self, cause: BaseException | None = None) -> None:
        """Ends the session: what was sent is delivered, then the others are told. Idempotent.

        Args:
            cause: the error that makes this member go; the others' errors will name it.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave(error)


class SoloSession(Session):
    """A world of one without a coordinator: what `join` gives when no PACELINE_* variable is set."""

    def __init__(self, job: str, config: Config) -> None:
        self.job = job
        (mesh,) = local_meshes(1)
        self.group = Group(mesh, config)
        self.store = MemoryStore(config.call_timeout)
        self._members = tuple(mesh.peers)
        self._left = False

    @property
    def members(self) -> Sequence[Peer]:
        """See `Session.members`."""
        return self._members

    def barrier(self, name: str, *, timeout: float | None = None) -> None:
        """See `Session.barrier`: nobody else to wait for."""
        if self._left:
            raise errors.SessionClosed("the session has ended")

    def leave(self, cause: BaseException | None = None) -> None:
        """See `Session.leave`."""
        if not self._left:
            self._left = True
            self.group.close()


class CoordinatedSession(Session):
    """A session with a coordinator."""

    def __init__(self, connection: MemberConnection, config: Config) -> None:
        self._connection = connection
        self._config = config
        self.job = connection.job
        self.group = connection.group
        self.store = connection.store
        self._leave_lock = threading.Lock()
        self._left = False
        atexit.register(self._leave_at_exit)

    @property
    def members(self) -> Sequence[Peer]:
        """See `Session.members`."""
        return self._connection.mesh.peers

    def barrier(self, name: str, *, timeout: float | None = None) -> None:
        """See `Session.barrier`."""
        check_process()
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise ValueError(f"a barrier's name has 1 to {MAX_NAME_BYTES} bytes, not {len(name.encode())}")
        if self._left:
            raise errors.SessionClosed("the session has ended")
        self._connection.barrier(name, self._config.call_timeout if timeout is None else timeout)

    def leave(self, cause: BaseException | None = None) -> None:
        """See `Session.leave`."""
        check_process()
        with self._leave_lock:
            if self._left:
                return
            self._left = True
        atexit.unregister(self._leave_at_exit)
        start = time.monotonic()
        # An error that the failed generation raised here is no news; one of this member's own is.
        fault = self._connection.mesh.fault
        own = cause is not None and not isinstance(cause, SystemExit) and (fault.is_own or not fault.failed)
        self._connection.close(f"{type(cause).__name__}: {cause}".rstrip(": ") if own else "")
        _log.debug("left job %r in %.3f s", self.job, time.monotonic() - start)

    def _leave_at_exit(self) -> None:
        try:
            check_process()
        except errors.ForkedSession:
            return  # a forked child that exits: the session is the parent's
        # Set by the interpreter when a script ends by an uncaught exception: the others shall be told of it. In an
        # interactive session it is any earlier error, which ended nothing.
        interactive = sys.flags.interactive or hasattr(sys, "ps1")
        self.leave(None if interactive else getattr(sys, "last_value", None))
