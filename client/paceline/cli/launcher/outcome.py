"""How a process ended, in words and as an exit code. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Exit", "in_order_of_blame", "shell_code"]


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one worker.

    Attributes:
        label: the worker as the user knows it: "rank 2", or "worker #2" if it never had a rank.
        pid: its process id.
        returncode: its exit code, or the negated number of the signal that killed it.
        follows: it failed over the failure of another member, and said so.
        slot: which of the launcher's workers it was, counted from 0; those who are started in its place share it.
        joined: it had been in a view.
    """

    label: str
    pid: int
    returncode: int
    follows: bool = False
    slot: int = 0
    joined: bool = False

    @property
    def how(self) -> str:
        """Completes "rank 2 ..."."""
        if self.returncode >= 0:
            return f"ended with exit code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"was killed by {name}"

    def __str__(self) -> str:
        return f"{self.label} (pid {self.pid}) {self.how}"


def shell_code(returncode: int) -> int:
    """The exit code as a shell gives it: 128 + signal for a process that a signal killed."""
    return returncode if returncode >= 0 else 128 - returncode


def in_order_of_blame(exits: Sequence[Exit]) -> list[Exit]:
    """Exits that were seen at the same moment, the likely cause first.

    A kill comes out of nowhere; a failing exit code within the same few milliseconds is most likely a peer's error
    over that kill.
    """
    return sorted(exits, key=lambda end: (end.follows, end.returncode >= 0, end.returncode == 0))
