"""How torch.distributed gets its process groups: the default one joins a job, the others are parts of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable
from typing import Any

from paceline import Group, Session, join
from paceline.embedded import coordinator
from paceline.errors import InvalidRank, PacelineError
from paceline.torch.process_group import ProcessGroup
from paceline.torch.process_group.core import NAME
from paceline.torch.store import Store, underlying

__all__ = ["create"]

_ADDRESS = "paceline/coordinator/{}"
"""In torch's store, which may outlive a group: where the coordinator is that rank 0 has started, by number of joins."""

_GONE, _GOING_S = "paceline/gone/{}", 3.0
"""In the job's store: which ranks are about to leave; seconds that rank 0 waits for them."""

_default: weakref.ref[ProcessGroup] | None = None
_joined = 0  # default groups that this process has had


def create(opts: Any, pg_options: Any = None) -> ProcessGroup:
    """What torch calls for each group that this process is a member of.

    Args:
        opts: torch's `_DistributedBackendOptions`.
        pg_options: users' `pg_options=`; there are none.

    Raises:
        PacelineError: the job cannot be joined; the text says why.
    """
    if pg_options is not None:
        raise TypeError(f"the backend {NAME!r} has no pg_options, not {pg_options!r}")
    timeout = opts.timeout.total_seconds()
    members = list(opts.global_ranks_in_group)
    parent = _default() if _default is not None else None
    if not members or parent is None or parent.is_over:
        return _first(opts, timeout)
    return _part(parent.paceline_group, members, opts.group_id, timeout)


def _first(opts: Any, timeout: float) -> ProcessGroup:
    """The default group: all members of a job."""
    global _default, _joined
    _joined += 1
    own = underlying(opts.store)
    with contextlib.ExitStack() as cleanup:
        if isinstance(own, Store) and own.session.size == opts.group_size:
            session = own.session
            leave: Callable[[], None] = own.close
        else:
            session = _join(opts, timeout, cleanup)
            cleanup.callback(_part_with, session)
            leave = cleanup.pop_all().close
    group = ProcessGroup(session.group, timeout, leave)
    _default = weakref.ref(group)
    return group


def _join(opts: Any, timeout: float, cleanup: contextlib.ExitStack) -> Session:
    """Joins by rank; at the coordinator of the environment, else at one that rank 0 starts for as long as it lives."""
    job = f"{os.environ.get('PACELINE_JOB') or 'torch'}.{_joined}"
    address = os.environ.get("PACELINE_COORDINATOR")
    if address is None and opts.group_size > 1:
        if opts.group_rank == 0:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            address = cleanup.enter_context(coordinator(listen=f"{host}:0"))
            opts.store.set(_ADDRESS.format(_joined), address)
        else:
            address = opts.store.get(_ADDRESS.format(_joined)).decode()
    return join(address, job=job, rank=opts.group_rank, world_size=opts.group_size, timeout=timeout)


def _part_with(session: Session) -> None:
    """Leaves. Rank 0 may have the coordinator: it gives the others a moment to go before it."""
    store, rank = session.store, session.rank
    with contextlib.suppress(PacelineError):  # a group that has failed, or others that stay: then it goes at once
        session.group.mesh.fault.check()
        if rank:
            store.set(_GONE.format(rank), b"")
        else:
            store.wait([_GONE.format(other) for other in range(1, session.size)], timeout=_GOING_S)
    session.leave()


def _part(whole: Group, members: list[int], group_id: str, timeout: float) -> ProcessGroup:
    """A group of some ranks; its name is torch's, in letters that Paceline has."""
    if members != sorted(set(members)):
        raise InvalidRank(f"the ranks of a group must ascend, as new_group has them: {members}")
    part = whole.subgroup(members, name=hashlib.sha256(group_id.encode()).hexdigest()[:32])
    return ProcessGroup(part, timeout, part.close)
