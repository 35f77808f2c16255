"""One round of a run's agents: a view of their job, in which they keep a session until all have stopped their workers.

Keys of the job's store, with the round's number N:

    N/over         why the round is over: an agent's workers failed, or another agent waits
    N/stopped/R    the agent of rank R has stopped its workers
    closed         the last round whose run is done for good
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from paceline import CoordinatorUnreachable, OperationTimeout, OrphanedError, PacelineError, Session
from paceline.launch import RunningJob
from paceline.torch import Store

_log = logging.getLogger("paceline.torchrun")

_FOR_EVER_S = 1e7

_LOOK_S = 1.0
"""Seconds between two looks at the coordinator: whether an agent waits, or whether a silent one is gone."""

_CLOSED = "closed"


class Round:
    """A round as one of its agents sees it.

    `number` grows from round to round, also over restarts of the coordinator. The session is in the round's view; `job`
    shows the run's agents from outside; `most` is the most agents in a round.
    """

    def __init__(self, session: Session, job: RunningJob, most: int) -> None:
        self.session = session
        self.store = Store(session)
        self.number = session.generation
        self._job = job
        self._members = tuple(session.members)
        self._rank, self._is_full = session.rank, session.size >= most
        self._over = threading.Event()
        self._start(self._wait_for_view)
        self._start(self._wait_for_key)
        if self._rank == 0 and not self._is_full:
            self._start(self._look_for_agents)

    @property
    def is_over(self) -> bool:
        """True if the agents must stop their workers and meet again."""
        return self._over.is_set()

    @property
    def host(self) -> str:
        """Where other hosts reach the agent of rank 0."""
        return self._members[0].address.rpartition(":")[0].strip("[]")

    def begins(self, last_call: float, timeout: float) -> bool:
        """Waits for more agents if there may be more; returns True if the round goes on with those that are there.

        `last_call` are the seconds to wait, `timeout` those for all agents to agree.
        """
        if self._rank == 0 and not self._is_full and self._over.wait(last_call):
            return False
        try:
            self.session.barrier("begin", timeout=timeout)
        except PacelineError as error:
            _log.info("round %d does not begin: %s", self.number, error)
            return False
        return True

    @property
    def is_closed(self) -> bool:
        """True if an agent of this round has closed the run."""
        return self._closed() == self.number

    @property
    def follows_closed(self) -> bool:
        """True if an agent of the round before has closed the run."""
        return self._closed() == self.number - 1

    def close(self, why: str) -> None:
        """Closes the run for all agents of this round, and those that wait for its end, and leaves.

        `why` says why this agent has failed, so that the others stop too; it is empty if its workers are done.
        """
        with contextlib.suppress(PacelineError):  # there is nobody left to tell
            self.session.store.set(_CLOSED, str(self.number).encode())
            if why:
                self._end(why)
        self.leave()

    def part(self, seconds: float) -> bool:
        """Waits until the other agents have stopped their workers too, or are gone, and leaves.

        Returns True if one of them has closed the run; raises TimeoutError if an agent is still busy with its workers.
        """
        give_up = time.monotonic() + seconds
        try:
            self._end("the workers of a node have stopped")
            self.session.store.set(f"{self.number}/stopped/{self._rank}", b"")
            for rank, member in enumerate(self._members):
                while not self._has_stopped(rank, member.member_id):
                    if time.monotonic() > give_up:
                        raise TimeoutError(f"{member} has not stopped its workers within {seconds:.0f} s")
            return self.is_closed
        except PacelineError as error:  # this agent was cut off, so the others have gone on without it
            _log.info("round %d: %s", self.number, error)
            return False
        finally:
            self.leave()

    def leave(self) -> None:
        """Leaves the round; its threads end."""
        self._over.set()
        self.store.close()

    def _has_stopped(self, rank: int, member_id: str) -> bool:
        """Waits a moment until an agent has stopped its workers; True if it has, or is gone."""
        with contextlib.suppress(OperationTimeout):
            self.session.store.wait([f"{self.number}/stopped/{rank}"], timeout=_LOOK_S)
            return True
        try:
            return member_id not in {member.member_id for member in self._job.status().members}
        except (CoordinatorUnreachable, OperationTimeout):
            return False

    def _closed(self) -> int:
        try:
            return int(self.session.store.get(_CLOSED, timeout=0.0))
        except OperationTimeout:
            return 0

    def _end(self, why: str) -> None:
        """Tells all agents that the round is over."""
        self._over.set()
        self.session.store.compare_set(f"{self.number}/over", None, why.encode())

    def _start(self, wait: Callable[[], None]) -> None:
        threading.Thread(target=wait, name="paceline-round", daemon=True).start()

    def _wait_for_key(self) -> None:
        """Waits until an agent ends the round; the end of the session ends the wait too."""
        with contextlib.suppress(PacelineError):
            why = self.session.store.get(f"{self.number}/over", timeout=_FOR_EVER_S)
            self._note(why.decode(errors="replace"))

    def _wait_for_view(self) -> None:
        """Waits until the view ends, in a barrier that no other agent enters."""
        try:
            self.session.barrier(f"round {self._rank}", timeout=_FOR_EVER_S)
        except OrphanedError as error:
            _log.warning("%s; workers go on without it", error)
        except PacelineError as error:
            with contextlib.suppress(PacelineError):
                if self.is_closed:
                    return  # an agent whose workers are done has left; the others' may go on
            self._note(str(error))

    def _look_for_agents(self) -> None:
        """Ends the round when another agent waits for the next one."""
        while not self._over.wait(_LOOK_S):
            with contextlib.suppress(PacelineError):  # the coordinator comes back, or the view ends
                if any(member.rank is None for member in self._job.status().members):
                    self._end("another node has come")

    def _note(self, why: str) -> None:
        if not self._over.is_set():
            _log.warning("round %d is over: %s", self.number, why)
            self._over.set()
