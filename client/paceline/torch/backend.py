"""How torch.distributed gets its process groups: the default one joins a job, the others are parts of it."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from paceline.elastic.join import join
from paceline.elastic.session import Session
from paceline.elastic.torchrun_world import join_rank_0, next_world
from paceline.errors import InvalidRank
from paceline.group import Group
from paceline.torch.process_group import ProcessGroup
from paceline.torch.process_group.core import NAME
from paceline.torch.releases import wants_reconfiguration
from paceline.torch.store import Store, underlying

__all__ = ["create"]

_default: weakref.ref[ProcessGroup] | None = None


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
    if wants_reconfiguration(opts):
        return _reconfigurable(opts, timeout)
    members = list(opts.global_ranks_in_group)
    parent = _default() if _default is not None else None
    if not members or parent is None or parent.is_over:
        return _first(opts, timeout)
    return _part(parent.paceline_group, members, timeout)


def _reconfigurable(opts: Any, timeout: float) -> ProcessGroup:
    """A group that gets its members later, and again and again."""
    global _default
    from paceline.torch.process_group.reconfigurable import Reconfigurable, meeting_point

    group = Reconfigurable(opts.group_rank, opts.group_size, timeout, meeting_point(opts.store))
    if not opts.global_ranks_in_group:
        _default = weakref.ref(group)
    return group


def _first(opts: Any, timeout: float) -> ProcessGroup:
    """The default group: all members of a job."""
    global _default
    number = next_world()
    own = underlying(opts.store)
    with contextlib.ExitStack() as cleanup:
        if isinstance(own, Store) and own.session.size == opts.group_size:
            session = own.session
            leave: Callable[[], None] = own.close
        else:
            session = _join(opts, timeout, number, cleanup)
            leave = cleanup.pop_all().close
    group = ProcessGroup(session.group, timeout, leave)
    _default = weakref.ref(group)
    return group


def _join(opts: Any, timeout: float, number: int, cleanup: contextlib.ExitStack) -> Session:
    """Joins by rank; at the coordinator of the environment, else at one that rank 0 starts for as long as it is there.

    It returns when all are in and have links, so that any of them may leave at once: rank 0 with its coordinator, too.
    """
    job = f"{os.environ.get('PACELINE_JOB') or 'torch'}.{number}"
    place = functools.partial(join, job=job, rank=opts.group_rank, world_size=opts.group_size, timeout=timeout)
    if os.environ.get("PACELINE_COORDINATOR") is not None or opts.group_size == 1:
        session = place()
    else:
        session = join_rank_0(place, opts.store, opts.group_rank, timeout, number, cleanup)
    cleanup.enter_context(session)
    session.group.barrier(timeout)
    return session


def _part(whole: Group, members: list[int], timeout: float) -> ProcessGroup:
    """A group of some ranks.

    torch's name of it stays out: that counts the groups that a process has made, and one that came later made fewer.
    """
    if members != sorted(set(members)):
        raise InvalidRank(f"the ranks of a group must ascend, as new_group has them: {members}")
    part = whole.subgroup(members)
    return ProcessGroup(part, timeout, part.close)
