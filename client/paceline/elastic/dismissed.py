"""The orderly end of a worker that has nothing more to do."""

from __future__ import annotations

__all__ = ["Dismissed"]


class Dismissed(SystemExit):
    """This worker has nothing more to do: it was drained, or the job is done. Uncaught, it ends the process with 0.

    Attributes:
        reason: which of the two, in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
