"""Tells glibc's malloc to keep the memory of frames instead of returning it to the kernel after each one.

Every frame of 1 MiB is allocated and freed several times on its way through grpc. By default malloc maps and unmaps
each, or grows and trims the heap, and the kernel zeroes the pages anew: a 16 MiB all_reduce at W=2 took 27 ms instead
of 16. Whether that happens depends on what the process freed before, because malloc adapts its thresholds (mallopt(3)).
Here they are set to the values that they would have after freeing one array of 16 MiB.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_frame_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_BYTES = 16 << 20
_TRIM_BYTES = 32 << 20
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_frame_memory() -> bool:
    """Sets the thresholds for this process: up to 32 MiB of free memory stay with it.

    Returns:
        False if nothing was changed: the user has set thresholds, or the C library has no `mallopt`.
    """
    if any(name in os.environ for name in _USERS_OWN) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
