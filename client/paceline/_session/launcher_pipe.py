"""A worker's side of the pipe to its launcher: carries a script's own records, one JSON object per line.

The pipe does not block: a launcher that is stopped or slow must not hold up training. So a record may be dropped,
unless the worker asks to wait for room.
"""

from __future__ import annotations

import json
import logging
import os
import select
import stat
import time
from typing import Any

LAUNCHER_FD = "PACELINE_LAUNCHER_FD"
"""Variable that names the descriptor of the pipe."""

_MAX_RECORD_BYTES = 4096
"""PIPE_BUF on Linux: a write up to this goes through whole or not at all, whatever other threads write."""


def tell_launcher(kind: str, record: dict[str, Any], *, wait_s: float = 0.0) -> bool:
    """Sends a record, at most 4 KiB of JSON, to the launcher of this process; False if there is none, or no room.

    Waits `wait_s` seconds for room in the pipe. The kinds "view", "loop", "waiting", "notice" and "error"
    belong to Paceline itself.
    """
    fd = os.environ.get(LAUNCHER_FD)
    if fd is None or not _is_pipe(fd):
        return False
    line = json.dumps({"kind": kind, **record}).encode() + b"\n"
    if len(line) > _MAX_RECORD_BYTES:
        raise ValueError(f"a record for the launcher has {len(line)} bytes; at most {_MAX_RECORD_BYTES} are allowed")
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


def notify_launcher(text: str, key: str = "") -> bool:
    """Sends the launcher a sentence that all workers of a job say alike, which it shows once.

    Texts with the same `key` count as the same. Returns False if there is no launcher or no room. A sentence that is
    too long for a record is cut.
    """
    most = len(text)
    while len(json.dumps(text[:most])) + len(json.dumps(key[:most])) > _MAX_RECORD_BYTES - 100:
        most //= 2
    return tell_launcher("notice", {"text": text[:most], "key": key[:most]})


def tell_once(log: logging.Logger, text: str, *, key: str = "", level: int = logging.WARNING) -> None:
    """Says what all workers of a job say alike: the launcher shows it once; without a launcher it is logged here.

    With a launcher the level of the log is DEBUG, because the user has the sentence already.
    """
    log.log(logging.DEBUG if notify_launcher(text, key) else level, "%s", text, stacklevel=2)


def _is_pipe(fd: str) -> bool:
    """True if the descriptor is a pipe. A script may have closed it, and it may be a file of the script's now."""
    try:
        return stat.S_ISFIFO(os.fstat(int(fd)).st_mode)
    except (OSError, ValueError):
        return False
