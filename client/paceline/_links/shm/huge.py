"""Huge pages behind large segments.

The kernel gives shared memory small pages unless an administrator has said otherwise (`shmem_enabled`), but makes huge
ones of a region on request: MADV_COLLAPSE, Linux 6.1 (madvise(2)). Of a region that holds nothing yet it does so faster
than it would give the small ones, and large arrays are folded and copied faster, for the processor has fewer addresses
to translate (figures: docs/decisions/013).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np

__all__ = ["collapse", "huge_page_bytes", "map_aligned"]

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MOST = 32 << 20
"""With pages of 64 KiB a huge one has 512 MiB: more than most arrays."""

_WORTHWHILE = 32 << 20
"""Arenas have larger segments. What is copied to peers lies in smaller ones, and is no faster for it."""

_MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def huge_page_bytes(size: int) -> int:
    """Size of the huge pages in which a segment of so many bytes should lie; 0 if in none."""
    return _huge_page_bytes() if size >= _WORTHWHILE else 0


@cache
def _huge_page_bytes() -> int:
    try:
        size = int(_SIZE.read_text()) if sys.platform == "linux" else 0
    except (OSError, ValueError):  # a kernel without them
        return 0
    return size if size <= _MOST else 0


def map_aligned(fd: int, size: int, *, writable: bool) -> memoryview:
    """Maps a file where a huge page can begin: it can lie behind one entry of the page table only there.

    Args:
        fd: the file; not needed any longer afterwards.
        size: bytes.
        writable: or only to be read.

    Returns:
        The bytes; the mapping goes with the last view of them.

    Raises:
        OSError: there is no address space left.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    step = _huge_page_bytes()
    # Room for it wherever it begins; Python unmaps all of that, and what was put there with it. (Where memory may not
    # be overcommitted, the writer's room counts in full until the file lies there.)
    room = mmap.mmap(-1, size + step, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, access)
    address = np.frombuffer(room, np.uint8).ctypes.data
    start = -address % step
    placed = _libc().mmap(address + start, size, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if placed != address + start:
        raise OSError(ctypes.get_errno(), f"no room for {size} bytes: {os.strerror(ctypes.get_errno())}")
    return memoryview(room)[start : start + size]


def collapse(fd: int, address: int, begin: int, end: int) -> bool:
    """Puts huge pages behind a region in which there is nothing yet; False if the kernel has or gives none.

    Args:
        fd: the file.
        address: where it is mapped.
        begin: offset of the region in it, a multiple of the huge page's size.
        end: likewise.

    Raises:
        OSError: no memory is left.
    """
    for offset in range(begin, end, _huge_page_bytes()):
        os.posix_fallocate(fd, offset, mmap.PAGESIZE)  # of nothing at all nothing can be made
    return not _libc().madvise(address + begin, end - begin, _MADV_COLLAPSE)  # without the GIL


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (word, word, number, number, number, ctypes.c_long), word
    libc.madvise.argtypes = (word, word, number)
    return libc
