"""When workers are to be stopped or started again, and what the launcher's exit code is. Pure: time is an argument."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from paceline.cli.launcher.outcome import Exit, shell_code
from paceline.cli.launcher.restarts import Restarts

__all__ = ["DRAIN_S", "KILL_AFTER_S", "Supervision", "Terms"]

KILL_AFTER_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""

DRAIN_S = 30.0
"""The same when the launcher of an elastic job is told to end: its workers leave at the end of their step."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a launcher is to do about failures.

    Attributes:
        workers: how many it starts.
        minimum: with fewer the job does not go on.
        elastic: the job goes on without a worker that fails.
        alone: no other launcher brings workers.
        restarts: how often each worker is started again at most.
        spares: how many processes wait with their imports done, to be the next workers that are started again.
    """

    workers: int = 1
    minimum: int = 1
    elastic: bool = False
    alone: bool = True
    restarts: int = 0
    spares: int = 0


class Supervision:
    """Decides for one launcher.

    In a job of fixed size a worker that fails leaves the others `grace` seconds to end with their own typed error,
    which says more than any kill. Whoever is still there then is stopped: SIGTERM, and SIGKILL `KILL_AFTER_S` later.
    An interrupt stops all at once in the same way; a second one kills.

    In an elastic job a worker that fails is started again (`Restarts`), or is lost and the others go on. When too many
    are lost for the job ever to have its minimum again, the others are stopped as above. Workers that ended with 0
    count as there: they have done their part, and whoever still works at his is not to be cut off. An interrupt starts
    nobody again, and leaves `DRAIN_S` for the workers to leave in good order.

    The exit code:

    - 128 + the signal that told the launcher to end, if one did.
    - A worker counts by the last process in its place: a failure that was followed by a restart is made good.
    - In an elastic job, lost workers are forgiven as soon as another one ends with 0: it saw the job through without
      them. What fails after that counts again.
    - 0 if no failure is left. Otherwise that of the first worker that failed, but one that failed by itself comes
      before those that failed over others.

    Args:
        grace: seconds.
        terms: what is to be done about failures.
    """

    def __init__(self, grace: float, terms: Terms | None = None) -> None:
        self._grace = grace
        self._terms = terms or Terms()
        self._restarts = Restarts(self._terms.restarts)
        self._due: dict[int, tuple[float, Exit]] = {}  # who is to be started again, when, and after which failure
        self._lost: dict[int, Exit] = {}
        self._unforgiven: list[Exit] = []
        self._interrupt: signal.Signals | None = None
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._sent: set[signal.Signals] = set()

    @property
    def stopping(self) -> bool:
        """True once workers were told to stop: what they do then is no failure of theirs."""
        return bool(self._sent)

    @property
    def interrupted(self) -> bool:
        """True once the launcher was told to end."""
        return self._interrupt is not None

    @property
    def restarting(self) -> bool:
        """True while a worker is to be started again."""
        return bool(self._due)

    def restartable(self, running: Collection[int]) -> int:
        """How many workers may be started again, or are about to be.

        Args:
            running: the workers that run.
        """
        if self.stopping or self.interrupted or self._stop_at is not None:
            return 0
        return len(self._due) + sum(self._restarts.left(slot) > 0 for slot in running)

    @property
    def deadline(self) -> float | None:
        """When `due` or `restarts_due` will next have something, None for never."""
        pending = [
            at
            for at, sent in ((self._stop_at, signal.SIGTERM), (self._kill_at, signal.SIGKILL))
            if at is not None and sent not in self._sent
        ]
        return min([*pending, *(at for at, _ in self._due.values())], default=None)

    @property
    def failure(self) -> Exit | None:
        """The failure that the exit code is of, by the rule above; None if none is left."""
        if not self._unforgiven:
            return None
        return next((end for end in self._unforgiven if not end.follows), self._unforgiven[0])

    @property
    def exit_code(self) -> int:
        """The launcher's exit code, by the rule above."""
        if self._interrupt is not None:
            return 128 + self._interrupt
        return 0 if self.failure is None else shell_code(self.failure.returncode)

    @property
    def summary(self) -> str:
        """What is left to be said when all have ended, empty for nothing."""
        if self.exit_code or not self._lost:
            return ""
        lost = " and ".join(f"{end.label} (pid {end.pid} {end.how})" for end in self._lost.values())
        return f"the others saw the job through without {lost}"

    def began(self, slot: int, now: float) -> None:
        """A worker was started."""
        self._restarts.began(slot, now)

    def ended(self, end: Exit, now: float) -> str:
        """A worker has ended.

        Returns:
            One sentence on what is done about it; empty if the job is of fixed size, or nothing is.
        """
        if self.stopping or self.interrupted:
            return ""
        if end.returncode == 0:
            if self._terms.elastic:
                self._unforgiven.clear()
            return ""
        if not self._terms.elastic:
            self._lose(end, now)
            return ""
        restart = self._restarts.failed(end, now)
        if restart.at is not None and self._stop_at is None:
            self._due[end.slot] = restart.at, end
            return restart.text
        return f"{str(end) if restart.at is not None else restart.text}{self._lose(end, now)}"

    def restarts_due(self, now: float) -> list[int]:
        """The workers to start again now; each comes once."""
        slots = sorted(slot for slot, (at, _) in self._due.items() if at <= now)
        for slot in slots:
            del self._due[slot]
        return slots

    def stop(self, now: float) -> None:
        """The workers are to end, through no fault of theirs."""
        self._due.clear()
        if not self._sent:
            self._stop_at = now

    def interrupt(self, signum: signal.Signals, now: float) -> None:
        """The launcher got a signal to end: the first one stops the workers, the second kills them."""
        self._due.clear()
        if self._interrupt is None:
            self._interrupt = signum
            self._stop_at = now
        else:
            self._kill_at = now

    def due(self, now: float) -> signal.Signals | None:
        """The signal to send to all workers now, or None; each comes once."""
        if self._kill_at is not None and now >= self._kill_at and signal.SIGKILL not in self._sent:
            self._sent |= {signal.SIGTERM, signal.SIGKILL}
            return signal.SIGKILL
        if self._stop_at is not None and now >= self._stop_at and signal.SIGTERM not in self._sent:
            self._sent.add(signal.SIGTERM)
            self._kill_at = now + (DRAIN_S if self._interrupt is not None and self._terms.elastic else KILL_AFTER_S)
            return signal.SIGTERM
        return None

    def _lose(self, end: Exit, now: float) -> str:
        """A failure that no restart makes good. Returns what that means for the others, to follow on a sentence."""
        self._lost[end.slot] = end
        self._unforgiven.append(end)
        left = self._terms.workers - len(self._lost)
        if self._terms.elastic and (left >= self._terms.minimum or not self._terms.alone):
            return "; the others go on" if left else ""
        if self._stop_at is not None:
            return ""
        self._stop_at = now + self._grace
        # Nobody is started into a job that cannot go on: those who were to be are lost too.
        for slot, (_, failed) in self._due.items():
            self._lost[slot] = failed
            self._unforgiven.append(failed)
        self._due.clear()
        return f"; the job needs {self._terms.minimum} workers and cannot get them any more" if left else ""
