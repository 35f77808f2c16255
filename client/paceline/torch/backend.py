"""How torch.distributed gets its process groups: the default one joins a job, the others are parts of it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed.rendezvous import rendezvous

from paceline import Group, Session, join
from paceline._loop import loop_thread
from paceline.embedded import coordinator
from paceline.errors import CoordinatorUnreachable, InvalidRank, OrphanedError
from paceline.session.address import Endpoint, knock, parse_endpoint
from paceline.session.session import CoordinatedSession
from paceline.torch._torch_store import Store, underlying
from paceline.torch.process_group import ProcessGroup
from paceline.torch.process_group.core import NAME
from paceline.torch.releases import wants_reconfiguration

__all__ = ["create", "join_torchruns_world"]

_log = logging.getLogger("paceline.torch")

_ADDRESS = "paceline/coordinator/{}/{}"
"""In torch's store: where the coordinator is that rank 0 started. The store outlives groups and torchrun's restarts,
so both are counted. Torchrun counts failures alone: when a node joins or leaves, all ranks start again with the same
number, and find the address of the life before until rank 0 has set its own."""

_AGAIN_S, _PAUSE_S, _KNOCK_S = 1.0, 0.1, 1.5
"""Seconds after which an address that refuses connections is given up, or under torchrun's agent is logged; from one
try to the next; and for a knock: 1 s for an answer, the rest to look the name up."""

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
    global _default, _joined
    _joined += 1
    own = underlying(opts.store)
    with contextlib.ExitStack() as cleanup:
        if isinstance(own, Store) and own.session.size == opts.group_size:
            session = own.session
            leave: Callable[[], None] = own.close
        else:
            session = _join(opts, timeout, cleanup)
            leave = cleanup.pop_all().close
    group = ProcessGroup(session.group, timeout, leave)
    _default = weakref.ref(group)
    return group


def _join(opts: Any, timeout: float, cleanup: contextlib.ExitStack) -> Session:
    """Joins by rank; at the coordinator of the environment, else at one that rank 0 starts for as long as it is there.

    It returns when all are in and have links, so that any of them may leave at once: rank 0 with its coordinator, too.
    """
    job = f"{os.environ.get('PACELINE_JOB') or 'torch'}.{_joined}"
    place = functools.partial(join, job=job, rank=opts.group_rank, world_size=opts.group_size, timeout=timeout)
    if os.environ.get("PACELINE_COORDINATOR") is not None or opts.group_size == 1:
        session = place()
    else:
        session = _join_rank_0(opts, place, cleanup)
    cleanup.enter_context(session)
    session.group.barrier(timeout)
    return session


def join_torchruns_world(place: Callable[..., Session], world: int, seconds: float) -> Session:
    """What `paceline.join()` does in a worker of torchrun: all of its workers are one world, of a fixed size.

    As `_join` it returns when all are in and have links.

    Args:
        place: `join`, without what torchrun says.
        world: number of workers, at least 2.
        seconds: to wait for torchrun's store, and for the others to be in.
    """
    global _joined
    _joined += 1
    timeout = timedelta(seconds=seconds)
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    opts = SimpleNamespace(store=store, group_rank=rank, timeout=timeout)
    with contextlib.ExitStack() as cleanup:
        session = _join_rank_0(opts, functools.partial(place, rank=rank, world_size=world), cleanup)
        assert isinstance(session, CoordinatedSession)
        session.after = cleanup.pop_all().close
    try:
        session.group.barrier(seconds)
    except BaseException as error:
        session.leave(error)
        raise
    session.all_start_again = True
    return session


def _is_silent(address: str) -> bool:
    """True if neither an answer nor a refusal comes from there: the host is off, out of reach, or slow."""
    return loop_thread().run(knock(parse_endpoint(address), _KNOCK_S)) is None


def _join_rank_0(opts: Any, place: Callable[..., Session], cleanup: contextlib.ExitStack) -> Session:
    """Joins at a coordinator that rank 0 has, and that ends with it.

    An address that refuses connections is that of a rank 0 that has ended. Under torchrun's agent there will be another
    one: the agent ends all ranks once one has failed, and starts them again. An address that is silent proves nothing:
    its host may be off or slow. It is not dialled, which would take the whole timeout; it is read and knocked at again.
    """
    place = functools.partial(place, coordinator_returns=False)
    key = _ADDRESS.format(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), _joined)
    if opts.group_rank == 0:
        here = Endpoint(os.environ.get("MASTER_ADDR", "127.0.0.1"), 0)
        address = cleanup.enter_context(coordinator(listen=str(here), for_good=True))
        opts.store.set(key, address)  # it listens: whoever finds this address refused need not wait
        return place(address)
    has_agent, began, told = "TORCHELASTIC_RUN_ID" in os.environ, time.monotonic(), False
    while True:
        address = opts.store.get(key).decode()
        silent = _is_silent(address)
        try:
            if silent:
                raise CoordinatorUnreachable(
                    f"{address} does not answer: its host is off, or cannot be reached or found by name from here"
                )
            return place(address)
        except (CoordinatorUnreachable, OrphanedError) as error:
            waited = time.monotonic() - began
            patience = opts.timeout.total_seconds() if has_agent or silent else _AGAIN_S
            if isinstance(error, OrphanedError) or waited > patience:
                raise type(error)(
                    f"rank {opts.group_rank} cannot join the coordinator that rank 0 has: {error}. Either rank 0 has "
                    "ended (its output says why): start all ranks again; or the name in MASTER_ADDR resolves to "
                    "another address on rank 0's host than here, perhaps a loopback address"
                ) from error
            if waited > _AGAIN_S and not told:
                told = True
                _log.warning(
                    "rank %d waits for rank 0 to start a coordinator: %s; if it has started one, the name in "
                    "MASTER_ADDR resolves to another address on its host than here",
                    opts.group_rank,
                    error,
                )
        time.sleep(_PAUSE_S)


def _part(whole: Group, members: list[int], timeout: float) -> ProcessGroup:
    """A group of some ranks.

    torch's name of it stays out: that counts the groups that a process has made, and one that came later made fewer.
    """
    if members != sorted(set(members)):
        raise InvalidRank(f"the ranks of a group must ascend, as new_group has them: {members}")
    part = whole.subgroup(members)
    return ProcessGroup(part, timeout, part.close)
