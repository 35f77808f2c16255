"""Tells errors that mean "out of memory, threads or descriptors" from all others."""

from __future__ import annotations

import errno

__all__ = ["is_exhausted"]

_NUMBERS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def is_exhausted(error: BaseException) -> bool:
    """True if this error says so: it is this process's own failure, whatever it happened to be doing."""
    if isinstance(error, RuntimeError):  # what Python says where there is no thread to be had
        return "can't start new thread" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NUMBERS)
