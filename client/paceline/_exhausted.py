"""Tells errors that mean "out of memory, threads or file descriptors" from all others."""

from __future__ import annotations

import errno

__all__ = ["is_exhausted"]

_NUMBERS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def is_exhausted(error: BaseException) -> bool:
    """Returns True if this process has run out of memory, threads or descriptors, so that no peer is to blame."""
    if isinstance(error, RuntimeError):  # Python's error if it cannot start a thread
        return "can't start new thread" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NUMBERS)
