"""The rendezvous handler that torchrun calls: its rounds are views of a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

import paceline
from paceline.launch import RunningJob
from paceline_torchrun._round import Round
from paceline_torchrun._terms import Terms

_AGREE_S = 60.0
"""Seconds in which the agents of a round must agree that it begins, beyond the last call."""


class Handler(RendezvousHandler):  # type: ignore[misc]  # torch has no types here
    """One agent's part in the rounds of its run."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._job = f"{terms.run_id}/nodes"
        self._seen = RunningJob(terms.coordinator, self._job)
        self._seen.__enter__()  # until this process ends: torch may call nothing after a signal
        self._round: Round | None = None

    def get_backend(self) -> str:
        """Returns the name of this backend."""
        return "paceline"

    def get_run_id(self) -> str:
        """Returns the name of the run."""
        return self._terms.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other agents in a new round.

        Raises:
            RendezvousClosedError: the run is done, or has failed for good at another node.
            RendezvousTimeoutError: the agents do not meet in time; the text says which are missing.
            RendezvousConnectionError: no coordinator answers, or it refuses this agent; the text says why.
        """
        give_up = time.monotonic() + self._terms.join_timeout
        with _errors_of_torch():
            former, self._round = self._round, None
            if former is not None and former.part(self._terms.join_timeout):
                raise RendezvousClosedError(f"run {self._terms.run_id!r} was closed by another node")
            while self._round is None:
                self._round = self._enter(give_up)
            return self._told(self._round)

    def num_nodes_waiting(self) -> int:
        """Returns 1 if the workers must be stopped: the round is over, or another agent waits for the next one."""
        return int(self._round is not None and self._round.is_over)

    def is_closed(self) -> bool:
        """Returns True if another agent has closed the run."""
        return self._round is not None and self._round.is_closed

    def set_closed(self) -> None:
        """Closes the run for all agents."""
        self.shutdown()

    def shutdown(self) -> bool:
        """Closes the run and leaves it."""
        former, self._round = self._round, None
        if former is not None:
            # torch calls this while the error that ends the agent is on its way: the others' workers must not wait.
            error = sys.exception()
            former.close("" if error is None else f"{type(error).__name__} at a node")
        return True

    def _enter(self, give_up: float) -> Round | None:
        """Joins the next round; returns None if it must be tried again because the agents have changed meanwhile."""
        terms = self._terms
        waits = False
        with suppress(paceline.PacelineError):  # there is no such run yet; or `join` says what is wrong
            waits = any(member.rank is not None for member in self._seen.status().members)
        session = paceline.join(
            terms.coordinator,
            job=self._job,
            min_workers=terms.min_nodes,
            max_workers=terms.max_nodes,
            timeout=max(0.0, give_up - time.monotonic()),
            advertise=terms.address,
            config=replace(paceline.Config.from_environment(), engine="links"),  # agents have no gradients
        )
        found = Round(session, self._seen, terms.max_nodes)
        if waits and found.follows_closed:
            found.leave()
            raise RendezvousClosedError(f"run {terms.run_id!r} was closed by another node, which this one waited for")
        if found.begins(terms.last_call, terms.last_call + _AGREE_S):
            return found
        found.leave()
        return None

    def _told(self, found: Round) -> RendezvousInfo:
        """Tells workers of the round by the environment, and torch by values."""
        os.environ["PACELINE_COORDINATOR"] = self._terms.coordinator
        os.environ["PACELINE_JOB"] = f"{self._terms.run_id}/{found.number}"
        session = found.session
        store = dist.PrefixStore(str(found.number), found.store)
        place = RendezvousStoreInfo.build(session.rank, store, local_addr=found.host)
        return RendezvousInfo(store, session.rank, session.size, place)


@contextmanager
def _errors_of_torch() -> Iterator[None]:
    """Raises Paceline's errors as those that torch's agent knows."""
    try:
        yield
    except (paceline.OperationTimeout, TimeoutError) as error:
        raise RendezvousTimeoutError(str(error)) from error
    except paceline.PacelineError as error:
        raise RendezvousConnectionError(str(error)) from error
