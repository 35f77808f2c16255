"""How a generation ends at one member: a suspicion, then the verdict, then the same typed error at all members.

A thread that sees a failure calls `Fault.suspect`. The first suspicion wakes all blocked calls, and goes to the peers
over the links and to the coordinator. The coordinator's verdict (`Fault.settle`) decides what is raised. If no verdict
comes in time, the member raises what it saw itself, so members stop without the coordinator too (I7, I8).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline import errors
from paceline._base.processes import check_process
from paceline._base.rpc import error_type
from paceline._base.waits import Latch
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

MAX_TEXT = 2000
"""Longest text in characters that is sent to peers, and accepted from a peer; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A failure that one member saw; `reason` decides the type of the error, and `text` is a sentence with the facts.

    `accused` is the rank at the other end; None when the member reports itself, with `cause` if that is an exception of
    its own. `operation` is the number of the collective, 0 for none. If it is `relayed`, a peer saw it and passed it
    on, and the coordinator hears of it from that peer. `unopened` is True for a lost link that could never be opened.
    """

    reason: ErrorReason.ValueType
    accused: int | None
    operation: int
    text: str
    relayed: bool = False
    cause: BaseException | None = field(default=None, compare=False)
    unopened: bool = False


def error_of(verdict: Verdict) -> errors.PacelineError:
    """Returns a new error of the type that belongs to the verdict's reason."""
    # Of two members with different versions neither has lost the coordinator.
    is_version = verdict.reason == ErrorReason.ERROR_REASON_VERSION
    error = errors.PeerLost if is_version else error_type(verdict.reason)
    return error(verdict.text, ranks=verdict.culprits, operation=verdict.operation, generation=verdict.generation)


class Fault:
    """The failure of one generation at one member. Thread-safe; every transition happens once.

    `error` waits `verdict_timeout` seconds for the verdict, counted from the first suspicion. `failed` is True from the
    first suspicion or the verdict on. Texts call this member `me`, or by its rank. `account` says in words what this
    member does that others may not do; empty for nothing. It is to blame then if calls do not match.
    """

    def __init__(self, generation: int, rank: int, verdict_timeout: float, me: str = "") -> None:
        self.generation = generation
        self._me = me or f"rank {rank}"
        self.failed = False  # no property: every step of every operation reads it
        self.account = ""
        self._rank = rank
        self._verdict_timeout = verdict_timeout
        self._lock = threading.Lock()
        self._settled = Latch()
        self._suspicion: Suspicion | None = None
        self._has_reported = False
        self._answer_by = 0.0  # `time.monotonic()` value until which `error` waits for a verdict
        self._verdict: Verdict | None = None
        self._wakers: list[Callable[[], None]] = []
        self._reporters: list[Callable[[Suspicion], None]] = []

    @property
    def is_own(self) -> bool:
        """True if the first failure that this member knows of was its own error."""
        suspicion = self._suspicion
        return suspicion is not None and suspicion.accused is None and not suspicion.relayed

    @property
    def own_error(self) -> Exception | None:
        """This member's own exception, if it was the first failure and is no PacelineError; else None.

        The member ends with this exception, because the next generation would fail in the same way.
        """
        cause = self._suspicion.cause if self._suspicion is not None else None
        return cause if isinstance(cause, Exception) and not isinstance(cause, errors.PacelineError) else None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None until it has come."""
        return self._verdict

    def on_failure(self, wake: Callable[[], None]) -> None:
        """Registers a function that wakes a blocked call. Calls it at once if the generation has failed already."""
        with self._lock:
            self._wakers.append(wake)
            failed = self.failed
        if failed:
            wake()

    def forget(self, wake: Callable[[], None]) -> None:
        """Undoes `on_failure`."""
        with self._lock, contextlib.suppress(ValueError):
            self._wakers.remove(wake)

    @property
    def first(self) -> Suspicion | None:
        """The first suspicion; None if there was none."""
        return self._suspicion

    def on_suspicion(self, report: Callable[[Suspicion], None]) -> None:
        """Registers a function that gets the first suspicion and what `suspect` reports besides, to pass it on."""
        self._reporters.append(report)

    def suspect(self, suspicion: Suspicion) -> None:
        """Records a failure: wakes all blocked calls and informs all reporters.

        Only the first suspicion counts. But a member that has reported nothing yet, and sees with its own eyes that
        another one broke the protocol, reports that all the same: the word of one witness proves nothing.
        """
        if self.account and suspicion.reason == ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH:
            # The two calls are Paceline's own, and say nothing to the user.
            differs = ErrorReason.ERROR_REASON_STEP_DIFFERS
            suspicion = Suspicion(differs, None, suspicion.operation, self.account[:MAX_TEXT])
        with self._lock:
            first, own = not self.failed, not suspicion.relayed
            broke = suspicion.reason == ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL
            if not first and not (own and broke and not self._has_reported):
                return
            self._has_reported |= own
            if first:  # the order matters: a thread that sees `failed` reads these without the lock
                self._answer_by = time.monotonic() + self._verdict_timeout
                self._suspicion = suspicion
                self.failed = True
        if first:
            self._wake()
        for report in self._reporters:
            report(suspicion)

    def broke(self, error: BaseException) -> None:
        """Reports that a thread or task of this member has failed, so that this member cannot continue."""
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
        text = f"{self._me} raised {words}"[:MAX_TEXT]
        self.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, 0, text, cause=error))

    def settle(self, verdict: Verdict) -> None:
        """Sets the verdict, which ends the generation. Only the first verdict counts."""
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict = verdict
            self.failed = True
        self._settled.set()
        self._wake()

    def await_verdict(self) -> None:
        """Waits as long for a verdict as `error` does, though this member has seen no failure: a mate of it has."""
        self._settled.wait(self._verdict_timeout)

    def expect_no_verdict(self) -> None:
        """Stops waiting for the verdict on this member's suspicion, because the coordinator cannot be reached."""
        if self._suspicion is not None:
            self._settled.set()

    def check(self) -> None:
        """Raises the generation's error if it has failed, and `ForkedSession` in a forked child."""
        check_process()
        if self.failed:
            raise self.error()

    def error(self) -> errors.PacelineError:
        """Returns the error to raise. Waits up to `verdict_timeout` for the verdict, then reports the own suspicion."""
        if self._verdict is None:
            self._settled.wait(max(0.0, self._answer_by - time.monotonic()))
        verdict, suspicion = self._verdict, self._suspicion
        if verdict is None:
            assert suspicion is not None, "error() before anything failed"
            culprits = (self._rank if suspicion.accused is None else suspicion.accused,)
            verdict = Verdict(self.generation, suspicion.reason, culprits, suspicion.operation, suspicion.text)
        error = error_of(verdict)
        error.__cause__ = self.own_error  # its traceback shows where it was raised
        return error

    def _wake(self) -> None:
        for wake in list(self._wakers):
            wake()
