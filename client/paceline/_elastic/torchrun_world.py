"""The world of torchrun: its workers meet at a coordinator that rank 0 runs, whose address is in torch's store.

`join` uses it in a worker of torchrun, and the backend "paceline" for the default group of torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from paceline._base.addresses import Endpoint, parse_endpoint, probe
from paceline._base.embedded import coordinator
from paceline._base.waits import loop_thread
from paceline._elastic.session import CoordinatedSession, Session
from paceline.errors import CoordinatorUnreachable, InvalidWorldSize, OrphanedError
from pacelinepb import install_command

_log = logging.getLogger("paceline.torch")

_ADDRESS_KEY = "paceline/coordinator/{}/{}"
"""The key of torch's store under which rank 0 gives the address of its coordinator; it contains the number of restarts
by torchrun and of worlds so far, because the store outlives both. Torchrun counts failures only: if a node joins or
leaves, all ranks start again with the same number, and find the old address until rank 0 sets the new one."""

_REFUSED_S = 1.0
"""Seconds after which an address that refuses connections is given up; under torchrun's agent, after which the wait is
logged."""

_RETRY_S = 0.1
"""Seconds between two tries to join rank 0's coordinator."""

_PROBE_S = 1.5
"""Seconds to probe an address: 1 s for an answer, the rest to resolve the name."""

_worlds = 0
"""The worlds that this process has joined."""


def next_world() -> int:
    """Counts another world that all ranks join; returns its number, from 1."""
    global _worlds
    _worlds += 1
    return _worlds


def join_torchruns_world(join: Callable[..., Session], world: int, seconds: float) -> Session:
    """Joins all workers of torchrun as one world of a fixed size, for `paceline.join()` in such a worker.

    Returns when all workers have joined and have links, so that any of them, rank 0 with its coordinator included, may
    leave at once. `join` is `paceline.join` with the arguments that do not come from torchrun. The timeout holds for
    torchrun's store, and for all workers to join.
    """
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise InvalidWorldSize(
            f"torchrun has started {world} workers (TORCHELASTIC_RUN_ID is set), which find each other through torch, "
            f"but torch cannot be imported here: {error}. Install it ({install_command('torch')}); or give a "
            "coordinator's address (PACELINE_COORDINATOR), or join(rank=0, world_size=1) for a worker that trains alone"
        ) from error
    number = next_world()
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    with contextlib.ExitStack() as cleanup:
        with_rank = functools.partial(join, rank=rank, world_size=world)
        session = join_rank_0(with_rank, store, rank, seconds, number, cleanup)
        assert isinstance(session, CoordinatedSession)
        session._after = cleanup.pop_all().close
    try:
        session.group.barrier(seconds)
    except BaseException as error:
        session.leave(error)
        raise
    session._all_start_again = True
    return session


def join_rank_0(
    join: Callable[..., Session], store: Any, rank: int, seconds: float, number: int, cleanup: contextlib.ExitStack
) -> Session:
    """Joins at a coordinator that rank 0 starts, and that ends with `cleanup` there.

    An address that refuses connections belongs to a rank 0 that has ended. Under torchrun's agent it will be replaced:
    the agent ends all ranks after one has failed, and starts them again. An address that does not answer proves
    nothing: its host may be off or slow. Dialling it could take the whole timeout, so the key is read and the address
    is probed again instead, for so many seconds. `number` is the world's, from `next_world`.
    """
    join = functools.partial(join, coordinator_returns=False)
    key = _ADDRESS_KEY.format(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), number)
    if rank == 0:
        here = Endpoint(os.environ.get("MASTER_ADDR", "127.0.0.1"), 0)
        address = cleanup.enter_context(coordinator(listen=str(here), for_good=True))
        store.set(key, address)  # it listens already, so a rank that it refuses need not wait for it
        return join(address)
    has_agent, began, logged = "TORCHELASTIC_RUN_ID" in os.environ, time.monotonic(), False
    while True:
        address = store.get(key).decode()
        silent = _is_silent(address)
        try:
            if silent:
                raise CoordinatorUnreachable(
                    f"{address} does not answer: its host is off, or cannot be reached or found by name from here"
                )
            return join(address)
        except (CoordinatorUnreachable, OrphanedError) as error:
            waited = time.monotonic() - began
            patience = seconds if has_agent or silent else _REFUSED_S
            if isinstance(error, OrphanedError) or waited > patience:
                raise type(error)(
                    f"rank {rank} cannot join the coordinator of rank 0: {error}. Either rank 0 has "
                    "ended (its output says why): start all ranks again; or the name in MASTER_ADDR resolves to "
                    "another address on rank 0's host than here, perhaps a loopback address"
                ) from error
            if waited > _REFUSED_S and not logged:
                logged = True
                _log.warning(
                    "rank %d waits for rank 0 to start a coordinator: %s; if it has started one, the name in "
                    "MASTER_ADDR resolves to another address on its host than here",
                    rank,
                    error,
                )
        time.sleep(_RETRY_S)


def _is_silent(address: str) -> bool:
    """True if an address neither answers nor refuses: its host is off, out of reach, or slow."""
    return loop_thread().run(probe(parse_endpoint(address), _PROBE_S)) is None
