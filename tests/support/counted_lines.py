"""Counts the lines of Python that a call runs: its work, whatever the machine's load is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["lines_of"]


def lines_of(call: Callable[[], object]) -> int:
    """Returns the number of lines that run; a line in a loop counts each time, also in a comprehension."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
