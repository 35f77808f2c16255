"""When workers are to be stopped, and what the launcher's exit code is. Pure: time is an argument."""

from __future__ import annotations

import signal

from paceline.cli.launcher.outcome import Exit, shell_code

__all__ = ["KILL_AFTER_S", "Supervision"]

KILL_AFTER_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


class Supervision:
    """Decides for one launcher.

    A worker that fails leaves the others `grace` seconds to end with their own typed error, which says more than any
    kill. Whoever is still there then is stopped: SIGTERM, and SIGKILL `KILL_AFTER_S` later. An interrupt stops all at
    once in the same way; a second one kills.

    Args:
        grace: seconds.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._failure: Exit | None = None
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
    def deadline(self) -> float | None:
        """When `due` will next have something, None for never."""
        pending = [
            at
            for at, sent in ((self._stop_at, signal.SIGTERM), (self._kill_at, signal.SIGKILL))
            if at is not None and sent not in self._sent
        ]
        return min(pending, default=None)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code: an interrupt, else the first worker that failed, else 0."""
        if self._interrupt is not None:
            return 128 + self._interrupt
        return 0 if self._failure is None else shell_code(self._failure.returncode)

    def ended(self, end: Exit, now: float) -> None:
        """A worker has ended. The first that fails counts, but one that failed by itself before those that followed."""
        if end.returncode == 0 or self.stopping:
            return
        if self._failure is None:
            self._failure = end
            self._stop_at = now + self._grace
        elif self._failure.follows and not end.follows:
            self._failure = end

    def interrupt(self, signum: signal.Signals, now: float) -> None:
        """The launcher got a signal to end: the first one stops the workers, the second kills them."""
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
            self._kill_at = now + KILL_AFTER_S
            return signal.SIGTERM
        return None
