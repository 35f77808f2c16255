"""Memory that one process writes and others only read: a sealed memfd.

It has no name, so nothing is left behind if a process dies. The seals guarantee to the reader that no process can
truncate the file under its mapping (which would kill the reader by SIGBUS), and to the writer that no other process can
ever write to it.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import sys
import threading
import weakref
from typing import Any

import numpy as np

from paceline._base.arrays import Array
from paceline._links.shm.huge import collapse, huge_page_bytes, map_aligned
from paceline.errors import LinkUnavailable

MAX_SEGMENT_BYTES = 1 << 44
"""Largest segment of a peer that is mapped: 16 TiB, the largest array that a signature can announce."""

_NAME = "paceline"

MEMORY_NAME = f"/memfd:{_NAME} (deleted)"
"""The name that /proc shows for a descriptor of such memory (memfd_create(2))."""

# fcntl.h, memfd.h; Python names F_SEAL_FUTURE_WRITE from 3.13 on. Linux has it since 5.1.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_MFD_NOEXEC_SEAL = 0x8
_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10


_lock = threading.Lock()
_attached: weakref.WeakValueDictionary[tuple[int, int], Attached] = weakref.WeakValueDictionary()


class SegmentError(ValueError):
    """A peer handed over a descriptor that is no segment, or not the segment that it announced."""


class Segment:
    """Shared memory of this process, as writable bytes and as an array, shape [size], uint8.

    `size` is a multiple of the page size. Others attach `fd`, which is -1 once closed. `address` is where the bytes
    begin in this process.

    Raises:
        LinkUnavailable: this system has no such memory.
        OSError: no descriptor or no memory is left.
    """

    def __init__(self, size: int) -> None:
        check_available()
        import fcntl  # absent on Windows

        self.size = size
        self.fd = _create()
        try:
            os.ftruncate(self.fd, size)
            self.memory = _map(self.fd, size, writable=True)
            # Seals the file after the writable mapping is made, so that it stays the only one.
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _FUTURE_WRITE | _SHRINK | _GROW | _SEAL)
        except BaseException:
            self.close()
            raise
        self.array: Array = np.frombuffer(self.memory, np.uint8)
        self.address: int = self.array.ctypes.data
        self._backed = 0
        self._huge_page = huge_page_bytes(size)

    def back(self, end: int) -> None:
        """Allocates memory behind the first `end` bytes, because a write without it could end in SIGBUS.

        A large segment gets huge pages where they fit. Raises OSError if no memory is left.
        """
        if end <= self._backed:
            return
        if page := self._huge_page:
            first, last = -(-self._backed // page) * page, end // page * page
            if first < last and not collapse(self.fd, self.address, first, last):
                self._huge_page = 0
        os.posix_fallocate(self.fd, self._backed, end - self._backed)
        self._backed = end

    def close(self) -> None:
        """Closes the descriptor and drops the mapping, which is removed with the last view of it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self.__dict__.pop("array", None)  # a traceback may keep this object for long
        self.__dict__.pop("memory", None)


class Attached:
    """A peer's segment, mapped read-only in this process. All links that use the segment share this object.

    Slices of `view` keep the mapping alive.
    """

    def __init__(self, view: memoryview) -> None:
        self.size = len(view)
        self.view = view


def attach(fd: int, size: int) -> Attached:
    """Maps a peer's segment. The caller keeps the descriptor, which the mapping does not need.

    Raises SegmentError if it is no valid segment of a peer; an OSError says that this process lacks room for it.
    """
    import fcntl

    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        raise SegmentError("the descriptor is not one of sealed memory") from None
    if not (seals & _SHRINK and seals & _GROW and seals & (_FUTURE_WRITE | _WRITE)):
        raise SegmentError(f"the memory has only the seals {seals:#x}: it could be cut short while it is read")
    status = os.fstat(fd)
    if not 0 < size <= MAX_SEGMENT_BYTES or status.st_size != size:
        raise SegmentError(f"the memory has {status.st_size} bytes, not {size}")
    key = status.st_dev, status.st_ino  # unique as long as the memory is mapped
    with _lock:
        attached = _attached.get(key)
        if attached is None:
            attached = _attached[key] = Attached(_map(fd, size, writable=False))
        return attached


def _create() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(_NAME, flags | _MFD_NOEXEC_SEAL)  # some systems refuse executable memory
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(_NAME, flags)  # Linux before 6.3


def _map(fd: int, size: int, *, writable: bool) -> memoryview:
    if huge_page_bytes(size):
        return map_aligned(fd, size, writable=writable)
    options: dict[str, Any] = {}
    if sys.version_info >= (3, 13):
        options["trackfd"] = False  # earlier versions keep a duplicate descriptor for each mapping
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, access, **options))


_NEEDED = ((os, "memfd_create"), (os, "eventfd"), (os, "posix_fallocate"), (select, "epoll"), (socket, "SCM_RIGHTS"))


def check_available() -> None:
    """Checks that this system has what shared memory needs; a LinkUnavailable names the missing function."""
    missing = [name for module, name in _NEEDED if not hasattr(module, name)]
    if missing:
        raise LinkUnavailable(f"no shared memory with peers: this system, or its Python, has no {', '.join(missing)}")
