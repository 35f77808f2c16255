"""Named barriers: connects the threads that wait in them with the control stream of one session."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from paceline import errors
from paceline._base.rpc import duration, error_type
from paceline._base.waits import Outcome
from paceline_protocol.messages import BarrierFailed, BarrierPassed
from pacelinepb.v1 import session_pb2 as pb

_SLACK = 5.0
"""Extra seconds to wait for the coordinator's answer after a timeout, because it names the missing members."""


class Barriers:
    """The open calls of one session's barriers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = itertools.count(1)
        self._rounds: Counter[tuple[int, str]] = Counter()
        self._turns: dict[tuple[int, str], threading.Lock] = {}
        self._ended: BaseException | None = None
        self._waiting: dict[int, tuple[pb.EnterBarrier, Outcome[None]]] = {}

    def check(self) -> None:
        """Raises the error that `fail` was given, if the session has ended."""
        with self._lock:
            if self._ended is not None:
                raise self._ended

    @contextmanager
    def turn(self, generation: int, name: str, timeout: float) -> Iterator[None]:
        """Lets one thread at a time into a barrier of this name, since two would enter the same round."""
        with self._lock:
            lock = self._turns.setdefault((generation, name), threading.Lock())
        if not lock.acquire(timeout=timeout):
            raise errors.OperationTimeout(
                f"barrier {name!r}: another thread of this member has been in it for {timeout} s"
            )
        try:
            yield
        finally:
            lock.release()

    def enter(self, generation: int, name: str, timeout: float) -> pb.EnterBarrier:
        """Prepares the arrival at the next round of a barrier."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            entry = pb.EnterBarrier(
                call=next(self._calls),
                generation=generation,
                name=name,
                round=self._rounds[generation, name],
                timeout=duration(timeout),
            )
            self._waiting[entry.call] = (entry, Outcome())
        return entry

    def wait(self, entry: pb.EnterBarrier, timeout: float) -> None:
        """Waits for the coordinator's answer; raises if not all members arrived in time, or the generation failed."""
        _, outcome = self._waiting[entry.call]
        try:
            done = outcome.wait(timeout + _SLACK)
        finally:
            with self._lock:
                self._waiting.pop(entry.call, None)
        if not done:
            text = f"barrier {entry.name!r}: the coordinator did not answer within {timeout + _SLACK:.1f} s"
            raise errors.OperationTimeout(text, generation=entry.generation)
        outcome.result()
        with self._lock:  # counts passed barriers only: members that come late to a failed one join the next attempt
            self._rounds[entry.generation, entry.name] += 1

    def answer(self, answer: BarrierPassed | BarrierFailed) -> None:
        """Completes a call with the coordinator's answer."""
        with self._lock:  # `fail` may run at the same time, and an outcome is set only once
            entry, outcome = self._waiting.get(answer.call, (None, None))
            if entry is None or outcome is None or outcome.done():
                return
            if isinstance(answer, BarrierPassed):
                outcome.set_result(None)
                return
            error = error_type(answer.reason)
            outcome.set_exception(error(answer.text, ranks=answer.culprits, generation=entry.generation))

    def in_flight(self) -> list[pb.EnterBarrier]:
        """Returns the arrivals without an answer, which are sent again after a reconnect."""
        with self._lock:
            return [entry for entry, _ in self._waiting.values()]

    def fail(self, error: BaseException) -> None:
        """Ends every wait with an error, and refuses new ones, because the session is over."""
        with self._lock:
            self._ended = self._ended or error
            for _, outcome in self._waiting.values():
                if not outcome.done():
                    outcome.set_exception(error)
