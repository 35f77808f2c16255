"""Shared memory that only its owner can write to, and nobody can cut short."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.links.shm_pair import descriptors

from paceline._links.shm.segment import Segment, SegmentError, attach, check_available
from paceline.errors import LinkUnavailable

SIZE = 1 << 16
ADD_SEALS, SHRINK, GROW, FUTURE_WRITE = 1033, 0x2, 0x4, 0x10


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(SIZE)
    yield made
    made.close()


@pytest.fixture
def theirs(segment: Segment) -> Iterator[int]:
    """The descriptor as a peer gets it."""
    fd = os.dup(segment.fd)
    yield fd
    os.close(fd)


def test_a_peer_reads_what_the_owner_writes(segment: Segment, theirs: int) -> None:
    attached = attach(theirs, SIZE)
    segment.memory[100:105] = b"hello"
    assert attached.view[100:105] == b"hello"
    assert attached.size == SIZE


def test_a_peer_cannot_write_resize_or_seal_a_segment(segment: Segment, theirs: int) -> None:
    attached = attach(theirs, SIZE)
    with pytest.raises(TypeError):
        attached.view[0:1] = b"x"
    with pytest.raises(TypeError):
        attached.view[0] = 1
    for breach in (
        lambda: mmap.mmap(theirs, SIZE),
        lambda: os.write(theirs, b"x"),
        lambda: os.pwrite(theirs, b"x", 5),
        lambda: os.ftruncate(theirs, 0),
        lambda: os.ftruncate(theirs, SIZE * 2),
        lambda: fcntl.fcntl(theirs, ADD_SEALS, SHRINK),
    ):
        with pytest.raises(PermissionError):
            breach()
    assert bytes(attached.view) == bytes(SIZE)


def test_a_peer_cannot_write_or_resize_a_segment_by_reopening_it(theirs: int) -> None:
    anew = os.open(f"/proc/self/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(anew, SIZE)
        with pytest.raises(PermissionError):
            os.write(anew, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(anew, 0)
    finally:
        os.close(anew)


def test_mappings_outlive_their_descriptors(segment: Segment, theirs: int) -> None:
    attached = attach(theirs, SIZE)
    segment.back(SIZE)
    segment.memory[:5] = b"first"
    view, memory = attached.view[:5], segment.memory
    del attached
    segment.close()
    segment.close()
    memory[:5] = b"later"
    assert view == b"later"


def test_attachments_share_one_mapping_until_the_last_is_dropped(theirs: int) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:paceline")

    before = mappings()
    first, second = attach(theirs, SIZE), attach(theirs, SIZE)
    assert first is second
    other = Segment(SIZE)
    third = attach(other.fd, SIZE)
    other.close()
    assert third is not first
    assert mappings() == before + 2
    del first, third
    assert mappings() == before + 1
    del second
    assert mappings() == before


def test_attach_refuses_incompletely_sealed_memory() -> None:
    for seals in (0, SHRINK, SHRINK | GROW, GROW | FUTURE_WRITE, SHRINK | FUTURE_WRITE):
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE)
        fcntl.fcntl(fd, ADD_SEALS, seals)
        with pytest.raises(SegmentError, match="cut short"):
            attach(fd, SIZE)
        os.close(fd)


def test_attach_refuses_descriptors_that_are_not_sealed_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    for fd in (os.open(tmp_path / "file", os.O_RDWR), os.eventfd(0), os.open("/dev/null", os.O_RDONLY)):
        with pytest.raises(SegmentError, match="not one of sealed memory"):
            attach(fd, SIZE)
        os.close(fd)


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1, SIZE * 2, 1 << 63, -SIZE])
def test_attach_refuses_a_wrong_size(theirs: int, size: int) -> None:
    with pytest.raises(SegmentError, match=f"{SIZE} bytes, not {size}"):
        attach(theirs, size)


def test_back_allocates_memory_up_to_the_given_size(segment: Segment) -> None:
    assert os.fstat(segment.fd).st_blocks == 0
    segment.back(4096)
    assert os.fstat(segment.fd).st_blocks * 512 == 4096
    segment.back(100)
    segment.back(SIZE)
    assert os.fstat(segment.fd).st_blocks * 512 == SIZE


def test_a_segment_works_on_a_kernel_without_mfd_noexec_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & 0x8:
            raise OSError(errno.EINVAL, "no such flag")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    made = Segment(SIZE)
    attach(made.fd, SIZE)
    made.close()


def test_a_failed_segment_creation_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    before = descriptors()
    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="no space"):
        Segment(SIZE)
    assert descriptors() == before


def test_a_system_without_memfd_create_raises_link_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "eventfd")
    for call in (check_available, lambda: Segment(SIZE)):
        with pytest.raises(LinkUnavailable, match="has no memfd_create, eventfd"):
            call()
