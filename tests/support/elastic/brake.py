"""A line goes slowly while a worker is on its way to it: how long one takes to start is the machine's affair.

A test that lets a newcomer in, or kills it as it comes, would else need a line that is long enough for any machine.
"""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["Brake"]

_STEP_S = 0.25
"""A step takes so long then."""

_LOOK_S = 0.005


class Brake:
    """Pressed by whoever has a file in a folder.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def press(self, who: str) -> None:
        """Somebody is on the way."""
        (self._folder / who).touch()

    def release(self, who: str) -> None:
        """It is there, or gone. Idempotent."""
        (self._folder / who).unlink(missing_ok=True)

    def compute(self, seconds: float) -> None:
        """Takes as long as the computation of a real model; longer while the brake is pressed."""
        began = time.monotonic()
        time.sleep(seconds)
        while time.monotonic() - began < _STEP_S and any(self._folder.iterdir()):
            time.sleep(_LOOK_S)
