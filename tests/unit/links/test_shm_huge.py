"""Huge pages behind large segments: both sides have them where the kernel gives some, and do without elsewhere."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.arrays import Array
from paceline.links.shm import huge, segment
from paceline.links.shm.huge import huge_page_bytes
from paceline.links.shm.segment import Attached, Segment, attach
from support.shm_pair import descriptors

HUGE = huge_page_bytes()
needs_huge = pytest.mark.skipif(not HUGE, reason="this kernel has no huge pages")
SIZE = 4 * (HUGE or 2 << 20) + 3 * 4096
"""Not a multiple of theirs."""


class Libc:
    """Of a system that is short of something: what it refuses fails with that number."""

    def __init__(self, refuse: str, number: int) -> None:
        self.asked: list[str] = []
        real = huge._libc()

        def refused(*_: object) -> int:
            self.asked.append(refuse)
            ctypes.set_errno(number)
            return ctypes.c_size_t(-1).value

        self.functions = SimpleNamespace(**{name: getattr(real, name) for name in ("mmap", "madvise")})
        setattr(self.functions, refuse, refused)

    def __call__(self) -> SimpleNamespace:
        return self.functions


@pytest.fixture
def made() -> Iterator[Segment]:
    made = Segment(SIZE)
    yield made
    made.close()


def huge_bytes(view: Array) -> int:
    """So much of the mapping in which the bytes lie is behind entries for huge pages, in this process."""
    address = view.ctypes.data
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(word, 16) for word in part.split()[0].split("-"))
        if begin <= address < end:
            (found,) = re.findall(r"ShmemPmdMapped:\s+(\d+) kB", part)
            return int(found) * 1024
    raise AssertionError("it is not mapped")


def read(attached: Attached) -> Array:
    return np.frombuffer(attached.view, np.uint8)


@needs_huge
def test_the_writer_and_the_reader_have_them(made: Segment) -> None:
    made.back(SIZE)
    made.array[:] = 7
    theirs = read(attach(made.fd, SIZE))
    assert int(theirs.sum()) == 7 * SIZE
    if not made._huge:
        pytest.skip("this kernel has none to give: Linux before 6.1, or memory in too small parts")
    assert huge_bytes(made.array) == huge_bytes(theirs) == 4 * HUGE


@needs_huge
def test_memory_comes_in_parts_of_any_size(made: Segment) -> None:
    """No more of it than was asked for: huge pages only where they fit between what is there and the end."""
    for end in (4096, HUGE // 2, 3 * HUGE + 4096, 3 * HUGE + 8192, SIZE):
        made.array[: made._backed] = 1
        made.back(end)
        assert os.fstat(made.fd).st_blocks * 512 == end
        assert int(made.array[:end].sum()) == made.array[:end].nonzero()[0].size, "what was there is there"
    if made._huge:
        made.array[:] = 1
        assert huge_bytes(made.array) == 2 * HUGE


@needs_huge
def test_a_kernel_that_gives_none_is_asked_once(made: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Libc("madvise", errno.EINVAL)
    monkeypatch.setattr(huge, "_libc", old)
    made.back(2 * HUGE)
    made.back(SIZE)
    assert old.asked == ["madvise"]
    made.array[:] = 3
    assert int(read(attach(made.fd, SIZE)).sum()) == 3 * SIZE
    assert os.fstat(made.fd).st_blocks * 512 == SIZE


@pytest.mark.parametrize("text", [None, "nonsense", str(512 << 20)])
def test_without_them_or_with_larger_ones_than_arrays_memory_is_as_ever(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "size").write_text(text)
    monkeypatch.setattr(huge, "_SIZE", tmp_path / "size")
    none = huge.huge_page_bytes.__wrapped__()
    assert none == 0
    made = Segment(SIZE)  # by one process with, and read by one without
    monkeypatch.setattr(segment, "huge_page_bytes", lambda: none)
    plain = Segment(SIZE)
    for written in (made, plain):
        written.back(SIZE)
        written.array[:] = 5
        assert int(read(attach(written.fd, SIZE)).sum()) == 5 * SIZE
    monkeypatch.undo()
    assert int(read(attach(plain.fd, SIZE)).sum()) == 5 * SIZE
    for written in (made, plain):
        written.close()


@needs_huge
def test_no_address_space_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(huge, "_libc", Libc("mmap", errno.ENOMEM))
    with pytest.raises(OSError, match="no room for"):
        Segment(SIZE)
    assert descriptors() == before


def test_a_large_mapping_goes_with_its_last_view() -> None:
    def mapped() -> int:
        """In files without a name, and the room around them."""
        return sum(
            int(end, 16) - int(begin, 16)
            for begin, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*memfd:paceline", _maps(), re.MULTILINE)
        )

    before = mapped()
    made = Segment(SIZE)
    theirs = read(attach(made.fd, SIZE))
    assert mapped() >= before + 2 * SIZE
    ours = made.memory[4096:8192]
    made.close()
    assert mapped() >= before + 2 * SIZE
    del theirs
    assert before + SIZE <= mapped() < before + 2 * SIZE
    ours[0] = 1
    del ours
    assert mapped() == before


def _maps() -> str:
    return Path("/proc/self/maps").read_text()
