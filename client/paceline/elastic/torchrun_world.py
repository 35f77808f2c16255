"""The world of torchrun: its workers meet at a coordinator that rank 0 has, whose address is in torch's store.

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

from paceline._loop import loop_thread
from paceline.elastic.session import CoordinatedSession, Session
from paceline.embedded import coordinator
from paceline.errors import CoordinatorUnreachable, InvalidWorldSize, OrphanedError
from paceline.session.address import Endpoint, knock, parse_endpoint

__all__ = ["join_rank_0", "join_torchruns_world", "next_world"]

_log = logging.getLogger("paceline.torch")

_ADDRESS = "paceline/coordinator/{}/{}"
"""In torch's store: where the coordinator is that rank 0 started. The store outlives groups and torchrun's restarts,
so both are counted. Torchrun counts failures alone: when a node joins or leaves, all ranks start again with the same
number, and find the address of the life before until rank 0 has set its own."""

_AGAIN_S, _PAUSE_S, _KNOCK_S = 1.0, 0.1, 1.5
"""Seconds after which an address that refuses connections is given up, or under torchrun's agent is logged; from one
try to the next; and for a knock: 1 s for an answer, the rest to look the name up."""

_worlds = 0  # that this process has been in


def next_world() -> int:
    """Count another world that all ranks enter; returns its number, from 1."""
    global _worlds
    _worlds += 1
    return _worlds


def join_torchruns_world(join: Callable[..., Session], world: int, seconds: float) -> Session:
    """Do what `paceline.join()` does in a worker of torchrun: all of its workers are one world, of a fixed size.

    It returns when all are in and have links, so that any of them may leave at once: rank 0 with its coordinator, too.

    Args:
        join: `paceline.join`, without what torchrun says.
        world: number of workers, at least 2.
        seconds: to wait for torchrun's store, and for the others to be in.

    Raises:
        InvalidWorldSize: torch, which finds the others, cannot be imported.
        PacelineError: the world cannot be joined; the text says why.
    """
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise InvalidWorldSize(
            f"torchrun has started {world} workers (TORCHELASTIC_RUN_ID is set), which meet by means of torch, but "
            f"it cannot be imported here: {error}. Install paceline[torch]; or give a coordinator's address "
            "(PACELINE_COORDINATOR), or join(rank=0, world_size=1) for a worker that shall train alone"
        ) from error
    number = next_world()
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    with contextlib.ExitStack() as cleanup:
        with_rank = functools.partial(join, rank=rank, world_size=world)
        session = join_rank_0(with_rank, store, rank, seconds, number, cleanup)
        assert isinstance(session, CoordinatedSession)
        session.after = cleanup.pop_all().close
    try:
        session.group.barrier(seconds)
    except BaseException as error:
        session.leave(error)
        raise
    session.all_start_again = True
    return session


def join_rank_0(
    join: Callable[..., Session], store: Any, rank: int, seconds: float, number: int, cleanup: contextlib.ExitStack
) -> Session:
    """Join at a coordinator that rank 0 has, and that ends with it.

    An address that refuses connections is that of a rank 0 that has ended. Under torchrun's agent there will be another
    one: the agent ends all ranks once one has failed, and starts them again. An address that is silent proves nothing:
    its host may be off or slow. It is not dialled, which would take the whole timeout; it is read and knocked at again.

    Args:
        join: `paceline.join`, but for the coordinator's address.
        store: torch's, where rank 0 tells the address.
        rank: of this process.
        seconds: to wait for a rank 0 that is silent, or that torchrun starts again.
        number: of `next_world`.
        cleanup: at its end rank 0's coordinator ends.
    """
    join = functools.partial(join, coordinator_returns=False)
    key = _ADDRESS.format(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), number)
    if rank == 0:
        here = Endpoint(os.environ.get("MASTER_ADDR", "127.0.0.1"), 0)
        address = cleanup.enter_context(coordinator(listen=str(here), for_good=True))
        store.set(key, address)  # it listens: a rank that finds this address refused need not wait
        return join(address)
    has_agent, began, told = "TORCHELASTIC_RUN_ID" in os.environ, time.monotonic(), False
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
            patience = seconds if has_agent or silent else _AGAIN_S
            if isinstance(error, OrphanedError) or waited > patience:
                raise type(error)(
                    f"rank {rank} cannot join the coordinator that rank 0 has: {error}. Either rank 0 has "
                    "ended (its output says why): start all ranks again; or the name in MASTER_ADDR resolves to "
                    "another address on rank 0's host than here, perhaps a loopback address"
                ) from error
            if waited > _AGAIN_S and not told:
                told = True
                _log.warning(
                    "rank %d waits for rank 0 to start a coordinator: %s; if it has started one, the name in "
                    "MASTER_ADDR resolves to another address on its host than here",
                    rank,
                    error,
                )
        time.sleep(_PAUSE_S)


def _is_silent(address: str) -> bool:
    """True if neither an answer nor a refusal comes from there: the host is off, out of reach, or slow."""
    return loop_thread().run(knock(parse_endpoint(address), _KNOCK_S)) is None
