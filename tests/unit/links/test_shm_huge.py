"""Huge pages behind large segments: both sides have them where the kernel gives some, and do without elsewhere."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from unit.links.shm_pair import descriptors

from paceline._base.arrays import Array
from paceline._links.shm import huge
from paceline._links.shm.segment import Attached, Segment, attach

HUGE = 2 << 20
SIZE = 17 * HUGE + 3 * 4096
"""Large enough, and not a multiple of theirs."""


def _gives_them() -> bool:
    """Whether this kernel gives huge pages to who asks as it should, and to nobody else: tried without Paceline.

    Linux has what is needed since 6.1; a container may forbid it.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    setting = huge._SIZE.with_name("shmem_enabled")
    asked = setting.exists() and ("[never]" in setting.read_text() or "[advise]" in setting.read_text())
    if release < (6, 1) or not asked or huge.huge_page_bytes(SIZE) != HUGE:
        return False
    with mmap.mmap(-1, 2 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
        start = -np.frombuffer(probe, np.uint8).ctypes.data % HUGE
        probe[start] = 1
        try:
            probe.madvise(25, start, HUGE)
        except OSError:
            return False
    return "ShmemPmdMapped" in Path("/proc/self/smaps").read_text()


needs_huge = pytest.mark.skipif(not _gives_them(), reason="this kernel gives no huge pages of 2 MiB on request")


class Libc:
    """Of a system that is short of something: what it refuses fails with that number."""

    def __init__(self, refuse: str, number: int) -> None:
        self.asked = 0
        real = huge._libc()

        def refused(*_: object) -> int:
            self.asked += 1
            ctypes.set_errno(number)
            return ctypes.c_size_t(-1).value

        self.functions = SimpleNamespace(mmap=real.mmap, madvise=real.madvise)
        setattr(self.functions, refuse, refused)

    def __call__(self) -> SimpleNamespace:
        return self.functions


@pytest.fixture
def made() -> Iterator[Segment]:
    made = Segment(SIZE)
    yield made
    made.close()


def mappings() -> list[tuple[int, int, str]]:
    """Of this process: where each begins and ends, and what /proc/self/smaps says of it."""
    found = []
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(word, 16) for word in part.split()[0].split("-"))
        found.append((begin, end, part))
    return found


def huge_bytes(view: Array) -> int:
    """So much of the mapping in which the bytes lie is behind entries for huge pages, in this process."""
    at = view.ctypes.data
    (told,) = (part for begin, end, part in mappings() if begin <= at < end)
    return 1024 * int(re.findall(r"ShmemPmdMapped:\s+(\d+) kB", told)[0])


def read(attached: Attached) -> Array:
    return np.frombuffer(attached.view, np.uint8)


@needs_huge
def test_writer_and_reader_both_map_huge_pages(made: Segment) -> None:
    made.back(SIZE)
    made.array[:] = 7
    theirs = read(attach(made.fd, SIZE))
    assert (theirs == 7).all()
    assert huge_bytes(made.array) == huge_bytes(theirs) == 17 * HUGE


@needs_huge
def test_back_allocates_parts_of_any_size_with_huge_pages_where_they_fit(made: Segment) -> None:
    """No more of it than was asked for: huge pages only where they fit between what is there and the end."""
    before = 0
    for end in (4096, HUGE // 2, 5 * HUGE + 4096, 5 * HUGE + 8192, SIZE):
        made.back(end)
        assert os.fstat(made.fd).st_blocks * 512 == end
        assert (made.array[:before] == 1).all(), "what was there is there"
        assert not made.array[before:end].any()
        made.array[before:end] = 1
        before = end
    assert huge_bytes(made.array) == (4 + 11) * HUGE


@needs_huge
def test_a_kernel_that_refuses_huge_pages_is_asked_once(made: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Libc("madvise", errno.EINVAL)
    monkeypatch.setattr(huge, "_libc", old)
    for end in (2 * HUGE, SIZE):
        made.back(end)
        assert os.fstat(made.fd).st_blocks * 512 == end
    assert old.asked == 1
    made.array[:] = 3
    assert (read(attach(made.fd, SIZE)) == 3).all()
    assert huge_bytes(made.array) == 0


@pytest.mark.parametrize("text", [None, "nonsense", str(512 << 20)])
def test_segments_use_ordinary_pages_when_huge_pages_are_unusable(
    made: Segment, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.back(SIZE)
    if text is not None:
        (tmp_path / "size").write_text(text)
    size = huge._huge_page_bytes(tmp_path / "size")
    assert size == 0
    monkeypatch.setattr(huge, "_huge_page_bytes", lambda: size)
    plain = Segment(SIZE)
    plain.back(SIZE)
    for written in (made, plain):  # by a process that has them, and by one that has not
        written.array[:] = 5
        assert (read(attach(written.fd, SIZE)) == 5).all()
    monkeypatch.undo()
    assert (read(attach(plain.fd, SIZE)) == 5).all()
    plain.close()


@needs_huge
def test_small_segments_are_mapped_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "_libc", Libc("mmap", errno.ENOMEM))
    for size in (4096, 8 * HUGE):
        made = Segment(size)
        made.back(size)
        attach(made.fd, size)
        made.close()


@needs_huge
def test_running_out_of_address_space_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(huge, "_libc", Libc("mmap", errno.ENOMEM))
    with pytest.raises(OSError, match="no room for"):
        Segment(SIZE)
    assert descriptors() == before


def test_a_large_mapping_is_unmapped_with_its_last_array_view() -> None:
    made = Segment(SIZE)
    theirs = read(attach(made.fd, SIZE))
    ours = made.memory[4096:8192]
    places = made.address, theirs.ctypes.data
    file = str(os.fstat(made.fd).st_ino)

    def is_mapped(at: int) -> bool:
        for line in Path("/proc/self/maps").read_text().splitlines():
            where, _, _, _, inode, *_ = line.split()
            begin, end = (int(word, 16) for word in where.split("-"))
            if begin <= at < end:
                return inode == file
        return False

    made.close()
    assert [is_mapped(at) for at in places] == [True, True]
    del theirs
    assert [is_mapped(at) for at in places] == [True, False]
    ours[0] = 1
    del ours
    assert [is_mapped(at) for at in places] == [False, False]


@needs_huge
def test_closing_large_segments_releases_their_address_space() -> None:
    gc.collect()

    def address_space() -> int:
        return 1024 * int(re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])

    before = address_space()
    for _ in range(100):
        made = Segment(SIZE)
        attach(made.fd, SIZE)
        made.close()
        del made
    assert address_space() < before + 100 * HUGE  # a thread that starts meanwhile may take 72 MiB
