"""A line goes slowly while a worker is on its way to it: how long one takes to start is the machine's affair.

A test that lets a newcomer in, or kills it as it comes, would else need a line that is long enough for any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["Brake"]

_STEP_S = 0.25
"""A step takes at least so long then."""

_SHARE = 0.2
"""And at least this share of the time for which the brake has been pressed: few steps pass on a slow machine."""

_LET_GO_S = 15.0
"""So long a worker presses it that lets go: it may be spare, and not in a step before the end."""

_MOST_S = 2.0
"""A step takes no longer, whatever its worker waits for."""

_LOOK_S = 0.005


class Brake:
    """Pressed by whoever has a file in a folder.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def press(self, who: str, *, lets_go: bool = False) -> None:
        """Somebody is on the way; with `lets_go` a worker that may never be in a step."""
        (self._folder / who).write_text("" if lets_go else "until it is released")

    def release(self, who: str) -> None:
        """It is there, or gone. Idempotent."""
        (self._folder / who).unlink(missing_ok=True)

    def compute(self, seconds: float, waits: Callable[[], bool] = lambda: False) -> None:
        """Takes as long as the computation of a real model; longer while the brake is pressed, or this worker waits."""
        began = time.monotonic()
        time.sleep(seconds)
        while (took := time.monotonic() - began) < _MOST_S and (took < self._least() or waits()):
            time.sleep(_LOOK_S)

    def _least(self) -> float:
        """The least seconds that a step takes now."""
        least = 0.0
        for file in self._folder.iterdir():
            with suppress(FileNotFoundError):  # released
                found = file.stat()
                pressed = time.time() - found.st_mtime
                if found.st_size or pressed < _LET_GO_S:
                    least = max(least, _STEP_S, _SHARE * pressed)
        return least
