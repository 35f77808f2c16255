"""The actor's side: one worker in the process of a Ray actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from paceline import Config, Credentials, Dismissed, PacelineError, ReplicaLost, Session, join


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where Ray has placed a worker: its host as its session shows it, and the node's IP address."""

    host: str
    pid: int
    address: str
    port: int = 0
    """Where the store of the replica listens that this worker leads."""


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """A worker's place in its replica of `size` ranks; rank 0 is at `lead`."""

    position: int
    size: int
    lead: WorkerPlace


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """The arguments of `join` that all workers of a run share; the `repr` contains no secret."""

    coordinator: str
    job: str
    min_workers: int
    max_workers: int
    config: Config
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker's good end.

    Attributes:
        rank, generation: its place in its last view; -1 and 0 if it was dismissed.
        value: what the training function returned.
        dismissed: the worker was drained, or came when the job was done, and has no value.
    """

    rank: int
    generation: int
    value: Any = None
    dismissed: bool = False


@dataclass(frozen=True, slots=True)
class Fate:
    """An error that the training function of a worker has raised, as the worker's actor reports it.

    Attributes:
        rank: its rank; None if it was in no view.
        follows: it failed because another member failed.
        error: the error's class and text in one line.
    """

    rank: int | None = None
    follows: bool = False
    error: str = "failed"


class HostedWorker:
    """One worker. The class of the actor; it has one thread, so that `train` runs in the process's main thread."""

    def __init__(self) -> None:
        self._fate = Fate()
        self._store: Any = None

    def place(self, leads: bool) -> WorkerPlace:
        """Returns where this process is; the driver learns by it that Ray had room.

        If it `leads` a replica, that replica's store listens from now on.
        """
        import ray

        address, port = ray.util.get_node_ip_address(), 0
        if leads:
            from torch.distributed import TCPStore

            self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        return WorkerPlace(socket.gethostname(), os.getpid(), address, port)

    def train(
        self,
        work: tuple[Callable[..., Any], tuple[Any, ...]],
        terms: JoinTerms,
        address: str,
        place: ReplicaRank | None,
    ) -> Finished:
        """Joins the job and calls the training function.

        `work` is the function, and its arguments behind the session. `address` is where other nodes reach this one, and
        `place` its rank in its replica, if it has one.
        """
        fn, args = work
        session: Session | None = None
        number: int | None = None  # its rank in `session.group`
        rank: int | None = None
        try:
            credentials = replace(Credentials.tls_from_environment(), token=terms.token)
            with join(
                terms.coordinator,
                job=terms.job,
                min_workers=terms.min_workers,
                max_workers=terms.max_workers,
                advertise=address,
                config=terms.config,
                credentials=credentials,
                **({} if place is None else {"replica": self._world_of(place)}),
            ) as session:
                try:
                    value = fn(session, *args)
                finally:  # it has no rank any more when it has left
                    rank = number = session.rank if session.members else None
                    if number is not None and place is not None:
                        rank = number * place.size + place.position
                return Finished(-1 if rank is None else rank, session.generation, value)
        except Dismissed:
            return Finished(-1, 0, dismissed=True)
        except SystemExit as error:
            # Ray would take it for a wish to end the actor, and the run for a death.
            self._fate = Fate(rank, error=f"called sys.exit({error.code!r})")
            raise RuntimeError(f"the training function called sys.exit({error.code!r})") from error
        except Exception as error:
            blamed = error.ranks if isinstance(error, PacelineError) else ()
            follows = isinstance(error, ReplicaLost) or (bool(blamed) and number not in blamed)
            first = str(error).partition("\n")[0]
            self._fate = Fate(rank, follows, f"raised {type(error).__name__}: {first:.500}")
            raise

    def _world_of(self, place: ReplicaRank) -> Any:
        """Makes the replica torch's world, and returns it."""
        import torch.distributed as dist

        store = self._store or dist.TCPStore(place.lead.address, place.lead.port, is_master=False)
        dist.init_process_group(store=store, rank=place.position, world_size=place.size)
        return dist.group.WORLD

    def fate(self) -> Fate:
        """Returns what the driver cannot see in the error of `train`."""
        return self._fate
