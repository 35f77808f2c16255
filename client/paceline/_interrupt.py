"""Ctrl-C in a script that has called `join` ends it without a stack trace, as it does under `paceline run`.

Only an interrupt that nobody caught is kept off the screen; the process still ends by SIGINT, as shells expect. A hook
that somebody else has set is left alone, and so are interactive sessions; PACELINE_TRACEBACK=1 shows the trace.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

__all__ = ["quiet_interrupt"]


def quiet_interrupt() -> None:
    """Sets the hook for uncaught exceptions, unless another is set. Idempotent."""
    shown = os.environ.get("PACELINE_TRACEBACK") == "1" or sys.flags.interactive or hasattr(sys, "ps1")
    if sys.excepthook is sys.__excepthook__ and not shown:
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
