"""`paceline.join`: from arguments and environment to a session."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from paceline._base.addresses import DEFAULT_PORT, CoordinatorAddresses
from paceline._base.arrays import keep_frame_memory
from paceline._base.launcher_variables import TORCH_WORLD, leave_launchers_world
from paceline._base.numbers import is_whole
from paceline._base.processes import check_process
from paceline._base.uncaught import install_hook
from paceline._base.waits import loop_thread
from paceline._collectives.choose import RULES, Rules, load_rules
from paceline._elastic.mates import ALONE, Alone, Mates
from paceline._elastic.session import CoordinatedSession, Session, SoloSession
from paceline._elastic.torchrun_world import join_torchruns_world
from paceline._session.identity import JoinRequest, launch_of
from paceline._session.joining import Joining
from paceline._session.member import MemberConnection
from paceline.config import Config, checked_timeout
from paceline.credentials import Credentials
from paceline.engines._catalogue import load_engine
from paceline.errors import ConcurrentUse, InvalidRank, InvalidWorldSize

ProcessGroup = Any
"""`torch.distributed.ProcessGroup`."""

DEFAULT_JOB = "default"
MAX_JOB_BYTES = 128
"""Longest name of a job (session.proto)."""


class _Here(threading.local):
    """The last session of this thread in each job, by the coordinators' addresses and the job's name."""

    def __init__(self) -> None:
        self.joined: WeakValueDictionary[tuple[str, str], CoordinatedSession] = WeakValueDictionary()


_here = _Here()


def join(
    coordinator: str | None = None,
    *,
    job: str | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
    advertise: str | None = None,
    config: Config | None = None,
    credentials: Credentials | None = None,
    coordinator_returns: bool = True,
    replica: ProcessGroup = ALONE,
) -> Session:
    """Joins a job and waits for its first view.

    Arguments that are not given come from the environment (`paceline.config.ENVIRONMENT`), then from the defaults. If
    neither has an address, the world is this process alone and needs no coordinator. Under torchrun, unless they give
    bounds or a rank, the world is torchrun's, with torchrun's ranks; if nothing has an address, rank 0 runs the
    coordinator.

    Args:
        coordinator: its address, "host:port" (port 7400 if left out); of several coordinators that share a state, all
            addresses, with commas between them.
        job: name of the job; all workers that name it join it.
        min_workers: the first view forms with at least this many.
        max_workers: no view has more; `min_workers` if left out.
        rank: explicit rank, with `world_size`, for jobs whose ranks are assigned elsewhere.
        world_size: explicit number of workers.
        timeout: seconds to wait for the view.
        advertise: host or host:port at which peers reach this worker; `join` finds it if left out.
        config: timeouts and limits.
        credentials: certificates for TLS, and a token.
        coordinator_returns: False if the coordinator lives in one of the members and ends with it. If its address
            refuses connections, the coordinator has ended then, and this worker does not wait for it.
        replica: a process group of torch whose ranks hold one copy of the model between them, by FSDP2, tensor or
            pipeline parallelism: they come, train and go together. All of them call `join` alike. `min_workers`,
            `max_workers`, and the session's `rank` and `size` count replicas then; torchrun's world is not used, since
            it is the inside of a replica. The call makes a Gloo group of these ranks.

    Returns:
        The session; a context manager that leaves the job at its end. Without `with` call `Session.close`; a script
        that ends without it leaves then.

    Raises:
        CoordinatorUnreachable: nobody, or no Paceline coordinator, answers at the address.
        OrphanedError: the coordinator has ended for good meanwhile.
        TlsFailed: TLS with the coordinator is impossible; the text says why.
        NotAuthenticated, NotPermitted: the coordinator wants a token, or another one.
        OperationTimeout: no view formed in time; the text says what was missing.
        SettingsMismatch: other members disagree on a setting, or another worker has claimed the rank.
        LinkUnavailable: the engine that the config names needs a package that is not installed.
        InvalidRank, InvalidWorldSize: an argument is out of range; or torchrun started this worker, and torch, which
            finds the others, cannot be imported.
        ValueError: the address, the job's name, a PACELINE_* variable or the table of schedules is malformed; or the
            credentials do not belong together; or `rank` was given with `replica`.
        TypeError: `replica` is no process group of torch; or None, as torch's default group is before it is made.
        ReplicaLost: another rank of the replica has ended.
        ConcurrentUse: this thread has a session in the job already, which is not closed.
        ForkedSession: this process was forked from one that has joined.
    """
    check_process()
    name: object = job
    if name is not None and not (isinstance(name, str) and 0 < len(name.encode()) <= MAX_JOB_BYTES):
        raise ValueError(f"a job's name is a text of 1 to {MAX_JOB_BYTES} bytes, not {job!r:.80}")
    environ = os.environ
    config = config or Config.from_environment(environ)
    if timeout is not None:
        config = replace(config, join_timeout=timeout)
    job = job or environ.get("PACELINE_JOB") or DEFAULT_JOB
    coordinator = coordinator or environ.get("PACELINE_COORDINATOR")
    # One argument of a pair replaces both variables: an explicit rank leaves those for bounds unread.
    ranked, bounded = (rank, world_size) != (None, None), (min_workers, max_workers) != (None, None)
    if not ranked:
        min_workers = _first(min_workers, environ, "PACELINE_MIN_WORKERS")
        max_workers = _first(max_workers, environ, "PACELINE_MAX_WORKERS")
    if replica is not ALONE and ranked:
        raise ValueError("join(replica=...) with a rank: the coordinator gives replicas their numbers. Leave it out")
    if not ranked and not bounded and replica is ALONE:
        rank = _first(None, environ, "PACELINE_RANK")
        world_size = _first(None, environ, "PACELINE_WORLD_SIZE")
    given = (rank, world_size, min_workers, max_workers)
    torchruns = _of_torchrun(environ) if given == (None, None, None, None) and replica is ALONE else 1
    if torchruns > 1 and coordinator is not None:
        rank, world_size = _first(None, environ, "RANK"), torchruns
    wanted = _membership(job, min_workers, max_workers, rank, world_size, rules_of(config))
    if coordinator is None:
        if wanted.min_workers > 1:
            raise InvalidWorldSize(
                f"{wanted.min_workers} workers need a coordinator: give its address, or set PACELINE_COORDINATOR"
            )
        if torchruns == 1:
            return SoloSession(job, config, mates_of(replica))
        load_engine(config.engine)
        place = partial(join, job=job, advertise=advertise, config=config, credentials=credentials)
        return join_torchruns_world(place, torchruns, config.join_timeout)
    load_engine(config.engine)
    if environ.get("PACELINE_COORDINATOR_ENDS", "") not in ("", "0"):
        coordinator_returns = False
    addresses = CoordinatorAddresses.parse(coordinator, default_port=DEFAULT_PORT)
    before = _here.joined.get((str(addresses), job))
    if before is not None and before._needs_this_thread():
        raise ConcurrentUse(
            f"this thread is in job {job!r} already, and a second join would wait for its first session: use "
            f"{before!r}, or end it before with session.close()"
        )
    if (job, coordinator) == (environ.get("PACELINE_JOB"), environ.get("PACELINE_COORDINATOR")):
        wanted.launch = launch_of(environ, config.join_timeout)
    if replica is ALONE:
        leave_launchers_world()
    elif environ.get(TORCH_WORLD):
        raise ValueError(
            "join(replica=...) in workers of paceline run, whose world of torch.distributed is all of them: give "
            "--replica-size, so that each replica has a world of its own"
        )
    wanted.mates = mates = mates_of(replica)
    joining = connect(
        addresses,
        wanted,
        config,
        advertise=advertise,
        credentials=credentials,
        coordinator_returns=coordinator_returns,
    )
    session = CoordinatedSession(joining.join(checked_timeout(config.join_timeout)), config, mates)
    session._all_start_again = torchruns > 1
    _here.joined[str(addresses), job] = session
    return session


def mates_of(replica: Any) -> Alone:
    """Returns the ranks of this worker's replica; a collective of them."""
    if isinstance(replica, Alone):
        return replica
    if replica is None:
        raise TypeError(
            "join(replica=None): torch has no process group yet. Call torch.distributed.init_process_group() before "
            "join(replica=dist.group.WORLD)"
        )
    return Mates(replica)


def rules_of(config: Config) -> Rules:
    """Returns the rules by which this worker chooses among schedules."""
    return load_rules(Path(config.tuning)) if config.tuning else RULES


def connect(
    coordinators: CoordinatorAddresses,
    wanted: JoinRequest,
    config: Config,
    *,
    advertise: str | None = None,
    credentials: Credentials | None = None,
    coordinator_returns: bool = True,
) -> Joining:
    """Makes a member that has yet to join, with addresses and credentials from the environment."""
    keep_frame_memory()
    install_hook()
    member = MemberConnection(
        coordinators,
        wanted,
        advertise or os.environ.get("PACELINE_ADVERTISE"),
        config,
        loop_thread(),
        credentials or Credentials.from_environment(os.environ),
        coordinator_returns,
    )
    return Joining(member)


def _of_torchrun(environ: Mapping[str, str]) -> int:
    """Returns the number of workers of the torchrun that started this one; 1 if none did."""
    return (_first(None, environ, "WORLD_SIZE") or 1) if "TORCHELASTIC_RUN_ID" in environ else 1


def _first(argument: int | None, environ: Mapping[str, str], name: str) -> int | None:
    """Returns the argument, or else the variable as an integer."""
    text = environ.get(name)
    if argument is not None or not text:
        return argument
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, not {text!r}") from None


def _membership(
    job: str,
    min_workers: int | None,
    max_workers: int | None,
    rank: int | None,
    world_size: int | None,
    rules: Rules,
) -> JoinRequest:
    for name, value in (("world_size", world_size), ("min_workers", min_workers), ("max_workers", max_workers)):
        if value is not None and not is_whole(value):
            raise InvalidWorldSize(f"{name} must be a whole number, not {value!r}")
    if rank is not None and not is_whole(rank):
        raise InvalidRank(f"rank must be a whole number, not {rank!r}")
    if (rank is None) != (world_size is None):
        raise InvalidRank("rank and world_size go together: give both, or neither")
    if rank is not None and world_size is not None:
        if min_workers is not None or max_workers is not None:
            raise InvalidWorldSize("explicit ranks fix the world: leave min_workers and max_workers out")
        if world_size < 1:
            raise InvalidWorldSize(f"world_size must be at least 1, not {world_size}")
        if not 0 <= rank < world_size:
            raise InvalidRank(f"rank {rank} is outside a world of {world_size}")
        return JoinRequest(job, world_size, world_size, rank, rules)
    least = 1 if min_workers is None else min_workers
    most = least if max_workers is None else max_workers
    if least < 1:
        raise InvalidWorldSize(f"min_workers must be at least 1, not {least}")
    if most < least:
        raise InvalidWorldSize(f"max_workers ({most}) is below min_workers ({least})")
    return JoinRequest(job, least, most, None, rules)
