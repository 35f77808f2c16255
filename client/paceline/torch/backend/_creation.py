"""Creates process groups for torch.distributed: the default group joins a job, other groups are parts of it.

Ranks meet in one of three ways: with an init method "paceline://host:port/job" at a coordinator, which gives out ranks
and is torch's store too; with any other init method at the coordinator that the environment names; or else at one that
rank 0 starts, whose address is in torch's store.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from paceline import Group, Session, join
from paceline._loop import loop_thread
from paceline.embedded import coordinator
from paceline.errors import CoordinatorUnreachable, InvalidRank, OrphanedError
from paceline.session.address import Endpoint, knock, parse_endpoint
from paceline.session.session import CoordinatedSession
from paceline.torch.backend._process_group import NAME, ProcessGroup
from paceline.torch.backend._torch_store import Store, unwrap_store

__all__ = ["create", "join_torchruns_world", "rendezvous"]

_log = logging.getLogger("paceline.torch")

_ADDRESS_KEY = "paceline/coordinator/{}/{}"
"""The key of torch's store under which rank 0 gives the address of its coordinator; it contains the number of restarts
by torchrun and of default groups so far, because the store outlives both. Torchrun counts failures only: if a node
joins or leaves, all ranks start again with the same number, and find the old address until rank 0 sets the new one."""

_REFUSED_S = 1.0
"""Seconds after which an address that refuses connections is given up; under torchrun's agent, after which the wait is
logged."""

_RETRY_S = 0.1
"""Seconds between two tries to join rank 0's coordinator."""

_KNOCK_S = 1.5
"""Seconds to knock at an address: 1 s for an answer, the rest to resolve the name."""

_default: weakref.ref[ProcessGroup] | None = None
_default_groups = 0
"""The default groups that this process has had."""


def create(opts: Any, pg_options: Any = None) -> ProcessGroup:
    """Creates a process group; torch calls this for each group that this process is a member of.

    Args:
        opts: torch's `_DistributedBackendOptions`.
        pg_options: the user's `pg_options=`, which must be None.

    Raises:
        PacelineError: the job cannot be joined; the text says why.
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
    """Creates a group that gets its members by `torch.distributed._reconfigure`, as often as the user likes."""
    global _default
    # Here, because torch before 2.15 lacks what this module imports.
    from paceline.torch.backend._reconfigurable import Reconfigurable, meeting_point

    group = Reconfigurable(opts.group_rank, opts.group_size, timeout, meeting_point(opts.store))
    if not opts.global_ranks_in_group:
        _default = weakref.ref(group)
    return group


def _create_default(opts: Any, timeout: float) -> ProcessGroup:
    """Creates the default group: all members of a job."""
    global _default, _default_groups
    _default_groups += 1
    store = unwrap_store(opts.store)
    with contextlib.ExitStack() as cleanup:
        if isinstance(store, Store) and store.session.size == opts.group_size:
            session = store.session
            leave: Callable[[], None] = store.close
        else:
            session = _join(opts, timeout, cleanup)
            leave = cleanup.pop_all().close
    group = ProcessGroup(session.group, timeout, leave)
    _default = weakref.ref(group)
    return group


def _create_subgroup(whole: Group, members: list[int], timeout: float) -> ProcessGroup:
    """Creates a group of some ranks.

    torch's name of the group is not used: it contains the number of groups that a process has made, and a process that
    joined later has made fewer.
    """
    if members != sorted(set(members)):
        raise InvalidRank(f"the ranks of a group must ascend without repetition, as new_group sorts them: {members}")
    part = whole.subgroup(members)
    return ProcessGroup(part, timeout, part.close)


def rendezvous(url: str, timeout: timedelta = timedelta(seconds=300), **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Joins the job that a URL names, and yields (store, rank, world size).

    The rank is the one that `init_process_group` or the URL gives (`?rank=0&world_size=2`). Without one the coordinator
    assigns it, and `world_size` alone, or PACELINE_MIN_WORKERS, tells how many ranks to wait for.

    Args:
        url: paceline://HOST:PORT/JOB; the environment's host or job if it has none.
        timeout: for all ranks to join.

    Raises:
        ValueError: the URL is malformed.
        PacelineError: the job cannot be joined; the text says why.
    """
    parts = urlparse(url)
    query = {name: int(values[-1]) for name, values in parse_qs(parts.query).items()}
    unknown = query.keys() - {"rank", "world_size"}
    if unknown:
        raise ValueError(f"{url}: there is no {sorted(unknown)}; write paceline://host:port/job?rank=0&world_size=2")
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


def _join(opts: Any, timeout: float, cleanup: contextlib.ExitStack) -> Session:
    """Joins a job with torch's rank, at the environment's coordinator or at rank 0's, which ends with `cleanup`.

    Returns when all ranks have joined and have links, so that any of them, rank 0 with its coordinator included, may
    leave at once.
    """
    job = f"{os.environ.get('PACELINE_JOB') or 'torch'}.{_default_groups}"
    join_job = functools.partial(join, job=job, rank=opts.group_rank, world_size=opts.group_size, timeout=timeout)
    if os.environ.get("PACELINE_COORDINATOR") is not None or opts.group_size == 1:
        session = join_job()
    else:
        session = _join_rank_0(opts, join_job, cleanup)
    cleanup.enter_context(session)
    session.group.barrier(timeout)
    return session


def join_torchruns_world(join_job: Callable[..., Session], world: int, seconds: float) -> Session:
    """Joins all workers of torchrun as one world of a fixed size, for `paceline.join()` in such a worker.

    Returns when all workers have joined and have links, as `_join` does.

    Args:
        join_job: `paceline.join` with the arguments that do not come from torchrun.
        world: number of workers, at least 2.
        seconds: timeout for torchrun's store, and for all workers to join.
    """
    global _default_groups
    _default_groups += 1
    timeout = timedelta(seconds=seconds)
    store, rank, _ = next(torch_rendezvous("env://", timeout=timeout))
    opts = SimpleNamespace(store=store, group_rank=rank, timeout=timeout)
    with contextlib.ExitStack() as cleanup:
        session = _join_rank_0(opts, functools.partial(join_job, rank=rank, world_size=world), cleanup)
        assert isinstance(session, CoordinatedSession)
        session.after = cleanup.pop_all().close
    try:
        session.group.barrier(seconds)
    except BaseException as error:
        session.leave(error)
        raise
    session.all_start_again = True
    return session


def _join_rank_0(opts: Any, join_job: Callable[..., Session], cleanup: contextlib.ExitStack) -> Session:
    """Joins at a coordinator that rank 0 starts, and that ends with `cleanup` there.

    An address that refuses connections belongs to a rank 0 that has ended. Under torchrun's agent it will be replaced:
    the agent ends all ranks after one has failed, and starts them again. An address that does not answer proves
    nothing: its host may be off or slow. Dialling it could take the whole timeout, so the key is read and the address
    is knocked at again instead.
    """
    join_job = functools.partial(join_job, coordinator_returns=False)
    key = _ADDRESS_KEY.format(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), _default_groups)
    if opts.group_rank == 0:
        here = Endpoint(os.environ.get("MASTER_ADDR", "127.0.0.1"), 0)
        address = cleanup.enter_context(coordinator(listen=str(here), for_good=True))
        opts.store.set(key, address)  # it listens already, so a rank that finds it refusing need not wait for it
        return join_job(address)
    has_agent, began, logged = "TORCHELASTIC_RUN_ID" in os.environ, time.monotonic(), False
    while True:
        address = opts.store.get(key).decode()
        silent = _is_silent(address)
        try:
            if silent:
                raise CoordinatorUnreachable(
                    f"{address} does not answer: its host is off, or cannot be reached or found by name from here"
                )
            return join_job(address)
        except (CoordinatorUnreachable, OrphanedError) as error:
            waited = time.monotonic() - began
            patience = opts.timeout.total_seconds() if has_agent or silent else _REFUSED_S
            if isinstance(error, OrphanedError) or waited > patience:
                raise type(error)(
                    f"rank {opts.group_rank} cannot join the coordinator that rank 0 has: {error}. Either rank 0 has "
                    "ended (its output says why): start all ranks again; or the name in MASTER_ADDR resolves to "
                    "another address on rank 0's host than here, perhaps a loopback address"
                ) from error
            if waited > _REFUSED_S and not logged:
                logged = True
                _log.warning(
                    "rank %d waits for rank 0 to start a coordinator: %s; if it has started one, the name in "
                    "MASTER_ADDR resolves to another address on its host than here",
                    opts.group_rank,
                    error,
                )
        time.sleep(_RETRY_S)


def _is_silent(address: str) -> bool:
    """Returns True if an address neither answers nor refuses: its host is off, out of reach, or slow."""
    return loop_thread().run(knock(parse_endpoint(address), _KNOCK_S)) is None
