"""Creates process groups for torch.distributed: the default group joins a job, other groups are parts of it.

With an init method "paceline://host:port/job" ranks meet at that coordinator, which assigns ranks and is also torch's
store. With any other init method they meet at the coordinator that the environment names, or else at one that rank 0
starts and whose address it puts into torch's store.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from paceline._elastic.join import join
from paceline._elastic.session import Session
from paceline._elastic.torchrun_world import join_rank_0, next_world
from paceline._group import Group
from paceline.errors import InvalidRank
from paceline.torch.backend._process_group import NAME, ProcessGroup
from paceline.torch.backend._torch_store import Store, unwrap_store

_default: weakref.ref[ProcessGroup] | None = None


def create(opts: Any, pg_options: Any = None) -> ProcessGroup:
    """Creates a process group; torch calls this for each group that this process is a member of.

    `opts` are torch's `_DistributedBackendOptions`; the user's `pg_options` must be None.
    """
    if pg_options is not None:
        raise TypeError(f"the backend {NAME!r} has no pg_options: leave out {pg_options!r}")
    timeout = opts.timeout.total_seconds()
    if getattr(opts, "enable_reconfigure", False):  # torch before 2.14 does not have this
        return _create_reconfigurable(opts, timeout)
    members = list(opts.global_ranks_in_group)
    parent = _default() if _default is not None else None
    if not members or parent is None or parent.is_over:
        return _create_default(opts, timeout)
    return _create_subgroup(parent.paceline_group, members, timeout)


def _create_reconfigurable(opts: Any, timeout: float) -> ProcessGroup:
    """Creates a group that gets its members from `torch.distributed._reconfigure`, as often as the user likes."""
    global _default
    # Imported here, because torch before 2.15 lacks names that the module imports.
    from paceline.torch.backend._reconfigurable import Reconfigurable, meeting_point

    group = Reconfigurable(opts.group_rank, opts.group_size, timeout, meeting_point(opts.store))
    if not opts.global_ranks_in_group:
        _default = weakref.ref(group)
    return group


def _create_default(opts: Any, timeout: float) -> ProcessGroup:
    """Creates the default group: all members of a job."""
    global _default
    number = next_world()
    store = unwrap_store(opts.store)
    with contextlib.ExitStack() as cleanup:
        if isinstance(store, Store) and store.session.size == opts.group_size:
            session = store.session
            leave: Callable[[], None] = store.close
        else:
            session = _join(opts, timeout, number, cleanup)
            leave = cleanup.pop_all().close
    group = ProcessGroup(session.group, timeout, leave)
    _default = weakref.ref(group)
    return group


def _create_subgroup(whole: Group, members: list[int], timeout: float) -> ProcessGroup:
    """Creates a group of some ranks.

    torch's name of the group is not used: it contains the number of groups that the process has made, and a process
    that joined later has made fewer.
    """
    if members != sorted(set(members)):
        raise InvalidRank(f"the ranks of a group must ascend without repetition, as new_group sorts them: {members}")
    part = whole.subgroup(members)
    return ProcessGroup(part, timeout, part.close)


def rendezvous(url: str, timeout: timedelta = timedelta(seconds=300), **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Joins the job that a URL names, and yields (store, rank, world size).

    `init_process_group` or the URL (`?rank=0&world_size=2`) gives the rank. Otherwise the coordinator assigns it, and
    `world_size` alone, or PACELINE_MIN_WORKERS, gives the number of ranks to wait for. The URL is
    paceline://HOST:PORT/JOB; a missing host or job is taken from the environment.
    """
    parts = urlparse(url)
    query = {name: int(values[-1]) for name, values in parse_qs(parts.query).items()}
    unknown = query.keys() - {"rank", "world_size"}
    if unknown:
        raise ValueError(
            f"{url}: unknown parameters {sorted(unknown)}; write paceline://host:port/job?rank=0&world_size=2"
        )
    rank, world = (None if query.get(name, -1) == -1 else query[name] for name in ("rank", "world_size"))
    if rank is not None and world is None:
        raise ValueError(f"{url}: a rank needs a world_size; write paceline://host:port/job?rank=0&world_size=2")
    session = join(
        parts.netloc or None,
        job=parts.path.strip("/") or None,
        rank=rank,
        world_size=world if rank is not None else None,
        min_workers=world if rank is None else None,
        timeout=timeout.total_seconds(),
    )
    store = Store(session)
    store.set_timeout(timeout)
    yield store, session.rank, session.size


def _join(opts: Any, timeout: float, number: int, cleanup: contextlib.ExitStack) -> Session:
    """Joins a job with torch's rank, at the environment's coordinator or at rank 0's, which ends with `cleanup`.

    Returns when all ranks have joined and have links, so that any rank, even rank 0 with its coordinator, may leave at
    once.
    """
    job = f"{os.environ.get('PACELINE_JOB') or 'torch'}.{number}"
    join_job = functools.partial(join, job=job, rank=opts.group_rank, world_size=opts.group_size, timeout=timeout)
    if os.environ.get("PACELINE_COORDINATOR") is not None or opts.group_size == 1:
        session = join_job()
    else:
        session = join_rank_0(join_job, opts.store, opts.group_rank, timeout, number, cleanup)
    cleanup.enter_context(session)
    session.group.barrier(timeout)
    return session
