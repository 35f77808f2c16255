"""Huge pages behind large segments.

The kernel gives shared memory small pages unless an administrator has set `shmem_enabled`. But it turns a region into
huge pages on request: MADV_COLLAPSE, Linux 6.1 (madvise(2)). For an empty region that is faster than allocating small
pages. Large arrays are then folded and copied faster, because the processor has fewer addresses to translate (figures:
docs/decisions/08).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MOST = 32 << 20
"""Largest huge page in bytes that is used. With pages of 64 KiB, a huge page has 512 MiB: more than most arrays."""

_WORTHWHILE = 32 << 20
"""Smallest segment in bytes for huge pages. Arenas have larger ones. Copies for peers lie in smaller segments, and huge
pages do not make them faster."""

_MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def huge_page_bytes(size: int) -> int:
    """Returns the size of the huge pages for a segment of `size` bytes; 0 if it should have none."""
    return _huge_page_bytes() if size >= _WORTHWHILE else 0


@cache
def _huge_page_bytes(source: Path = _SIZE) -> int:
    try:
        size = int(source.read_text()) if sys.platform == "linux" else 0
    except (OSError, ValueError):  # a kernel without them
        return 0
    return size if size <= _MOST else 0


def map_aligned(fd: int, size: int, *, writable: bool) -> memoryview:
    """Maps a file at an address where a huge page can begin: only there can one page table entry map a huge page.

    The mapping is removed with the last view of the bytes, and does not need `fd`. Raises OSError if there is no
    address space left.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    step = _huge_page_bytes()
    # Reserves room for any alignment. Python unmaps all of it, together with the file that is mapped into it. (If the
    # system does not overcommit memory, the writer's room counts in full until the file is mapped there.)
    room = mmap.mmap(-1, size + step, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, access)
    address = np.frombuffer(room, np.uint8).ctypes.data
    start = -address % step
    placed = _libc().mmap(address + start, size, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if placed != address + start:
        raise OSError(ctypes.get_errno(), f"no room for {size} bytes: {os.strerror(ctypes.get_errno())}")
    return memoryview(room)[start : start + size]


def collapse(fd: int, address: int, begin: int, end: int) -> bool:
    """Puts huge pages behind a region that is still empty. Returns False if the kernel has none or gives none.

    `address` is where the file is mapped. The region's bounds in the file are multiples of the huge page's size. Raises
    OSError if no memory is left.
    """
    for offset in range(begin, end, _huge_page_bytes()):
        os.posix_fallocate(fd, offset, mmap.PAGESIZE)  # the kernel collapses only a range that has a page
    return not _libc().madvise(address + begin, end - begin, _MADV_COLLAPSE)  # without the GIL


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (word, word, number, number, number, ctypes.c_long), word
    libc.madvise.argtypes = (word, word, number)
    return libc
