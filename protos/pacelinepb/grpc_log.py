"""Keeps strangers from filling the log by way of grpc.

grpc.aio logs a stack for each part of a call that it cannot read, before any handler or token is looked at: a header
that is no UTF-8, with all of its bytes; a method's name that is none; an answer to a caller that has hung up. With
references to one header (HPACK) a stranger who sends 90 KB makes it write 150 MB. What callers can cause so is logged
once in `_PERIOD_S` for each kind, with its number, and without any of the caller's text.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from types import SimpleNamespace, TracebackType
from typing import Any

from pacelinepb.remarks import Remarks

__all__ = ["Paced", "pace_log"]

_PERIOD_S = 60.0
"""Seconds between two lines about one kind of call."""

_BY_CALLERS = frozenset(("DecodeError", "ExecuteBatchError", "TooMuchMetadata", "UnicodeDecodeError"))
"""Names of the exceptions of which a caller alone can make any number."""

_GRPC = (".pyx", ".pxi", "grpc_metadata.py")
"""Files of grpc itself, and the one that stands between two of its functions."""


class Paced(logging.Filter):
    """Passes on a record about what a caller has sent if another of its kind is due; passes on all other records."""

    def __init__(self) -> None:
        super().__init__()
        self._remarks = Remarks(_PERIOD_S)

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is logged; takes the caller's text out of it."""
        error, _, trace = record.exc_info or (None, None, None)
        if error is None or error.__name__ not in _BY_CALLERS:
            return True
        if error is UnicodeDecodeError and _is_of_python(trace):  # a servicer's bug
            return True
        kind = " ".join(str(record.msg).split()[:2])  # grpc's own words: what it quotes comes later
        if not (count := self._remarks.count(kind, time.monotonic())):
            return False
        times = f"{count} times since the last line about it" if count > 1 else "further ones are counted"
        record.msg = f"{kind}: a caller has sent what grpc cannot read, or has hung up ({times})"
        record.args = ()
        return True


def _is_of_python(trace: TracebackType | None) -> bool:
    """Returns True if the exception has passed through code in Python. What grpc reads itself, it reads in Cython."""
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(_GRPC):
        trace = trace.tb_next
    return trace is not None


def pace_log(cygrpc: Any) -> None:
    """Paces what grpc logs about callers.

    Args:
        cygrpc: grpc's extension module. It also prints a stack that it has just logged, to stderr.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(Paced())

    def print_exc(*args: Any, **how: Any) -> None:
        if not isinstance(sys.exc_info()[1], cygrpc.ExecuteBatchError):
            traceback.print_exc(*args, **how)

    cygrpc.traceback = SimpleNamespace(**{**vars(traceback), "print_exc": print_exc})
