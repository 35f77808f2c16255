"""Arrays in shared memory: given, found, taken back; and ordinary ones where there is none."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import resource
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from unit.links.shm_pair import descriptors

from paceline._links.shm.arena import LEND_BYTES, SEGMENT_BYTES, Arena, FreeBlocks, arena

MIB = 1 << 20


def address(x: np.ndarray[Any, Any]) -> int:
    return int(x.ctypes.data)


def test_arena_arrays_behave_like_ordinary_arrays() -> None:
    mine = Arena()
    for dtype in ("float32", "int8", "complex128", ml_dtypes.bfloat16):
        x = mine.empty((3, 50_000), dtype)
        assert x.shape == (3, 50_000)
        assert x.dtype == np.dtype(dtype)
        assert x.flags.c_contiguous
        assert x.flags.writeable
        assert address(x) % 4096 == 0
        x[:] = 1
        assert (x == np.ones((3, 50_000), dtype)).all()
    assert mine.empty(100_000).shape == (100_000,)


def test_arrays_do_not_overlap_and_find_locates_them() -> None:
    mine = Arena()
    arrays = [mine.empty((size,), np.uint8) for size in (LEND_BYTES, 100_000, 5 * MIB, 70 * MIB, MIB)]
    for number, x in enumerate(arrays):
        x[:] = number
    for number, x in enumerate(arrays):
        assert (x == number).all()
        found = mine.find(address(x), x.nbytes)
        assert found is not None
        segment, offset = found
        assert (segment.array[offset : offset + x.nbytes] == number).all()
    assert len(mine.segments) == 2
    assert mine.segments[0].number != mine.segments[1].number


def test_find_ignores_memory_outside_the_arena() -> None:
    mine = Arena()
    assert mine.find(0, 1) is None
    x = mine.empty((MIB,), np.uint8)
    (segment,) = mine.segments
    other = np.empty(MIB, np.uint8)
    assert mine.find(address(other), other.nbytes) is None
    assert mine.find(segment.address - 1, 1) is None
    assert mine.find(segment.address + segment.size, 1) is None
    assert mine.find(segment.address + segment.size - 1, 2) is None
    assert mine.find(segment.address + segment.size - 1, 1) == (segment, segment.size - 1)
    assert mine.find(address(x) + 17, 1000) == (segment, 17)


def test_small_and_object_arrays_use_ordinary_memory() -> None:
    mine = Arena()
    mine.empty((LEND_BYTES - 1,), np.uint8)
    mine.empty((0, 5), np.uint8)
    mine.empty((), np.float64)
    mine.empty((MIB,), object)
    assert mine.segments == []


def test_any_numpy_view_of_an_array_keeps_its_memory_allocated() -> None:
    mine = Arena()
    x = mine.empty((MIB,), np.float32)
    kept: list[Any] = [x.reshape(2, -1)[1], memoryview(x[5:]), x.view(np.int32)[::7].T, np.frombuffer(x.data, np.uint8)]
    del x
    while kept:
        gc.collect()
        assert not mine.segments[0].blocks.is_whole
        kept.pop()
    assert mine.segments[0].blocks.is_whole


def test_freed_blocks_are_reused() -> None:
    mine = Arena()
    x = mine.empty((MIB,), np.uint8)
    y = mine.empty((MIB,), np.uint8)
    at = address(x)
    del x
    z = mine.empty((MIB,), np.uint8)
    assert address(z) == at
    del y, z
    whole = mine.empty((SEGMENT_BYTES,), np.uint8)
    assert address(whole) == at
    assert len(mine.segments) == 1


def test_freeing_a_large_array_retires_its_segment_and_notifies_watchers() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.heard: list[int] = []

        def retired(self, number: int) -> None:
            self.heard.append(number)

    mine, watcher, gone = Arena(), Watcher(), Watcher()
    mine.watch(watcher)
    mine.watch(gone)
    del gone
    small = mine.empty((MIB,), np.uint8)
    large = mine.empty((SEGMENT_BYTES + 1,), np.uint8)
    number = max(segment.number for segment in mine.segments)
    before = descriptors()
    del large
    assert watcher.heard == [number]
    assert len(mine.segments) == 1
    assert descriptors() < before
    del small
    assert len(mine.segments) == 1, "one of ordinary size is kept"


def test_adding_a_watcher_waits_while_others_are_notified() -> None:
    class Watcher:
        def retired(self, number: int) -> None:
            """It is of no use to this one."""

    class Slow(weakref.WeakSet[Watcher]):
        def __iter__(self) -> Iterator[Watcher]:
            comes.start()
            comes.join(0.1)
            assert comes.is_alive(), "it is added to what is being read"
            return super().__iter__()

    mine, first, late = Arena(), Watcher(), Watcher()
    comes = threading.Thread(target=mine.watch, args=(late,))
    mine._watchers = Slow([first])
    del first
    large = mine.empty((SEGMENT_BYTES + 1,), np.uint8)
    del large
    comes.join(10.0)
    assert late in mine._watchers
    assert not mine.segments


def test_a_segment_can_retire_while_the_same_thread_adds_a_watcher() -> None:
    """As a collection does that making a weak reference sets off."""

    class Watcher:
        def __init__(self) -> None:
            self.heard: list[int] = []

        def retired(self, number: int) -> None:
            self.heard.append(number)

    class Freeing(weakref.WeakSet[Watcher]):
        def add(self, item: Watcher) -> None:
            arrays.clear()
            super().add(item)

    mine, first, late = Arena(), Watcher(), Watcher()
    arrays: list[Any] = []
    mine._watchers = Freeing([first])
    arrays.append(mine.empty((SEGMENT_BYTES + 1,), np.uint8))
    mine.watch(late)
    assert len(first.heard) == 1
    assert late in mine._watchers


def test_an_array_freed_while_the_lock_is_held_is_reclaimed_later() -> None:
    """The lock may be held by the very thread in which the finalizer runs."""
    mine = Arena()
    x = mine.empty((MIB,), np.uint8)
    mine._lock.acquire()
    del x
    mine._lock.release()
    assert not mine.segments[0].blocks.is_whole
    y = mine.empty((SEGMENT_BYTES,), np.uint8)
    assert len(mine.segments) == 1, "what waited was taken back first"
    del y


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "posix_fallocate"])
def test_arrays_use_ordinary_memory_when_shared_memory_runs_out(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out(*_: object) -> int:
        raise OSError(errno.ENOSPC, "there is none left")

    mine = Arena()
    before = descriptors()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "paceline.links"):
        patch.setattr(os, call, out)
        for _ in range(3):
            x = mine.empty((MIB,), np.uint8)
            x[:] = 1
            assert mine.find(address(x), x.nbytes) is None
    assert [record.name for record in caplog.records] == ["paceline.links"]
    assert "there is none left" in caplog.text
    y = mine.empty((MIB,), np.uint8)
    assert mine.find(address(y), y.nbytes) is not None
    assert descriptors() <= before + 2


def test_arrays_use_ordinary_memory_when_descriptors_run_out(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        x = Arena().empty((MIB,), np.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert x.nbytes == MIB
    assert "Too many open files" in caplog.text


def test_a_forked_child_neither_frees_nor_allocates_its_parents_memory() -> None:
    x = arena().empty((MIB,), np.uint8)
    x[:] = 1
    found = arena().find(address(x), x.nbytes)
    assert found is not None
    segment, _ = found
    before = list(segment.blocks._starts), list(segment.blocks._sizes)
    parents = arena()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            same = bool(x[0] == 1)
            y = arena().empty((MIB,), np.uint8)
            y[:] = 7
            own = arena() is not parents and parents.find(address(y), y.nbytes) is None
            z = parents.empty((MIB,), np.uint8)
            ordinary = parents.find(address(z), z.nbytes) is None
            del x
            kept = (list(segment.blocks._starts), list(segment.blocks._sizes)) == before
            os.write(writing, bytes([same, own, ordinary, kept]))
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 10) == bytes([1, 1, 1, 1])
    os.close(reading)
    os.waitpid(child, 0)
    assert (x == 1).all()


def test_arrays_of_concurrent_threads_do_not_overlap() -> None:
    mine = Arena()
    wrong: list[int] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        held: list[np.ndarray[Any, Any]] = []
        for _ in range(150):
            x = mine.empty((rng.randrange(LEND_BYTES, MIB),), np.uint8)
            x[:] = number
            held.append(x)
            if len(held) > 5:
                del held[rng.randrange(5)]
            wrong.extend(number for y in held if not (y[0] == y[-1] == number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    mine.empty((MIB,), np.uint8)
    assert all(segment.blocks.is_whole for segment in mine.segments)


def test_freed_blocks_merge_in_any_order() -> None:
    rng = random.Random(1)
    for _ in range(50):
        blocks = FreeBlocks(1000)
        taken = []
        while (start := blocks.take(size := rng.randrange(1, 100))) is not None:
            taken.append((start, size))
        places = sorted(taken)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(places))
        rng.shuffle(taken)
        for start, size in taken:
            assert not blocks.is_whole
            blocks.give(start, size)
        assert blocks.is_whole
    assert blocks.take(1001) is None
    assert blocks.take(1000) == 0
    assert blocks.take(1) is None
