"""The wait of `join` for a first view, which the training thread spends in `wait` while the loop hears of the view."""

from __future__ import annotations

import asyncio
import logging
import time

from paceline import errors
from paceline._base.addresses import CoordinatorAddresses
from paceline._base.waits import Outcome
from paceline._session.launcher_pipe import tell_launcher

_log = logging.getLogger("paceline.session")

_PATIENT = 1.0
"""Seconds to wait for a view before the user is told; most views form sooner."""


class FirstView:
    """The wait of one member for its first view; `answered` is True once a coordinator has taken it."""

    def __init__(self, job: str, coordinators: CoordinatorAddresses) -> None:
        self.reason = f"no coordinator answers at {coordinators} yet"
        self.answered = False
        self._job = job
        self._coordinators = coordinators
        self._came: Outcome[None] = Outcome()
        self._began = self._give_up_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if the wait is over: the view has come, no view is needed, or `join` has failed."""
        return self._came.done()

    def wait(self, timeout: float, whole: float) -> None:
        """Waits for the view, at the end of `whole` seconds; raises `OperationTimeout`, or what `fail` was given."""
        if not self._came.wait(timeout):
            text = f"job {self._job!r} at {self._coordinators}: no view in {whole:.1f} s: {self.reason}"
            raise errors.OperationTimeout(text)
        self._came.result()

    # On the loop.

    def begin(self, timeout: float) -> None:
        """Begins to wait for so many seconds at most."""
        self._began = time.monotonic()
        self._give_up_at = self._began + timeout
        asyncio.get_running_loop().call_later(_PATIENT, self._tell_launcher)

    def left(self) -> float:
        """Returns how many seconds are left."""
        return max(0.0, self._give_up_at - time.monotonic())

    def came(self) -> None:
        """Ends the wait: the group has its links."""
        self._came.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Ends the wait with an error, if it is not over."""
        if not self._came.done():
            self._came.set_exception(error)

    def waits_for(self, reason: str) -> None:
        """Notes what the coordinator waits for; the user is told if that takes long."""
        self.reason = reason
        if time.monotonic() - self._began > _PATIENT:
            self._tell_launcher()

    def on_trouble(self, text: str) -> None:
        """Reports at once that a name does not resolve or has no route, since that is mostly a typing error."""
        self.reason = text
        if not self._tell_launcher():
            _log.warning("job %r: %s", self._job, text)

    def _tell_launcher(self) -> bool:
        """Tells the launcher what this worker waits for, so that it can show the user; True if it is told."""
        if self._came.done():
            return False
        left = self._give_up_at - time.monotonic()
        how_long = f"; trying for another {left:.0f} s" if not self.answered and left >= 1.0 else ""
        reason = f"job {self._job!r}: {self.reason}"
        return tell_launcher("waiting", {"job": self._job, "reason": reason + how_long, "key": reason})
