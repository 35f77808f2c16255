"""A worker's side of the pipe to its launcher: carries a script's own records, one JSON object per line.

The pipe does not block: a launcher that is stopped or slow must not hold up training. So a record may be dropped,
unless the worker asks to wait for room.
"""

from __future__ import annotations

import json
import os
import select
import stat
import time
from typing import Any

__all__ = ["LAUNCHER_FD", "tell_launcher"]

LAUNCHER_FD = "PACELINE_LAUNCHER_FD"
"""Variable that names the descriptor of the pipe."""

_MAX_RECORD_BYTES = 4096
"""PIPE_BUF on Linux: a write up to this goes through whole or not at all, whatever other threads write."""


def tell_launcher(kind: str, record: dict[str, Any], *, wait_s: float = 0.0) -> bool:
    """Sends a record to the launcher of this process, if it has one.

    Args:
        kind: what the record is; "view" belongs to Paceline itself.
        record: values that JSON can represent, at most 4 KiB.
        wait_s: seconds to wait for room in the pipe.

    Returns:
        True if the record is on its way, False if there is no launcher or no room.

    Raises:
        ValueError: the record is too long.
    """
    fd = os.environ.get(LAUNCHER_FD)
    if fd is None or not _is_pipe(fd):
        return False
    line = json.dumps({"kind": kind, **record}).encode() + b"\n"
    if len(line) > _MAX_RECORD_BYTES:
        raise ValueError(f"a record for the launcher has {len(line)} bytes, {_MAX_RECORD_BYTES} at most")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            os.write(int(fd), line)
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [int(fd)], [], left)[1]:
                return False
        except OSError:  # the launcher is gone, or the descriptor is no longer the pipe
            return False
        else:
            return True


def _is_pipe(fd: str) -> bool:
    """True if the descriptor is a pipe. A script may have closed it, and it may be a file of the script's now."""
    try:
        return stat.S_ISFIFO(os.fstat(int(fd)).st_mode)
    except (OSError, ValueError):
        return False
