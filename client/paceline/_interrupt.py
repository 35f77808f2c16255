"""Keeps the stack trace of Ctrl-C off the screen in a script that has called `join`, as `paceline run` does.

This affects only an interrupt that no code caught, and the process still ends by SIGINT, as shells expect. A hook that
other code has set stays, and interactive sessions do not change. PACELINE_TRACEBACK=1 shows the trace.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

__all__ = ["quiet_interrupt"]


def quiet_interrupt() -> None:
    """Sets the hook for uncaught exceptions, unless other code has set one. Idempotent."""
    shown = os.environ.get("PACELINE_TRACEBACK") == "1" or sys.flags.interactive or hasattr(sys, "ps1")
    if sys.excepthook is sys.__excepthook__ and not shown:
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
