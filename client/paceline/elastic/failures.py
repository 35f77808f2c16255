"""How often a step was tried in a row, and why it failed each time: what fails too often will fail again. Pure."""

from __future__ import annotations

from paceline.errors import StepVoid

__all__ = ["MAX_ATTEMPTS", "Failures"]

MAX_ATTEMPTS = 5
"""A step that fails so often in a row will fail again."""


class Failures:
    """Of the step that is tried now."""

    def __init__(self) -> None:
        self._step = 0
        self._causes: list[str] = []

    def begin(self, step: int) -> int:
        """A step is tried; returns how often that makes in a row, from 1."""
        if step != self._step:
            self._step = step
            self._causes.clear()
        return len(self._causes) + 1

    def add(self, step: int, cause: BaseException | None) -> None:
        """It has failed.

        Raises:
            StepVoid: once too often; the text has every cause.
        """
        self.begin(step)
        self._causes.append(f"{type(cause).__name__}: {cause}")
        if len(self._causes) >= MAX_ATTEMPTS:
            raise StepVoid(f"step {step} failed {len(self._causes)} times in a row: " + "; ".join(self._causes))
