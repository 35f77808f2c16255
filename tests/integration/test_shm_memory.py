"""What links in shared memory keep beside the user's arrays."""

from __future__ import annotations

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BUCKET = 25 << 20
"""Bytes: the default of `DDP(bucket_mb=)` between hosts."""

CODE = """
def shared():
    '''Bytes of memfds that this process has mapped, as its share of each page.'''
    total, counts = 0, False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            counts = "memfd:" in line
        elif counts and words[0] == "Pss:":
            total += int(words[1]) << 10
    return total

with paceline.join() as session:
    group = session.group
    x = np.ones(16 << 20, np.float32)
    for call in (lambda: group.all_reduce(x, out=x), lambda: group.broadcast(x, out=x), lambda: group.all_to_all(x)):
        x[:] = 1
        call()
        group.barrier()
    emit("facts", shared=shared())
    group.barrier()
"""


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.sampled(2)
def test_shared_memory_beyond_the_arrays_is_at_most_two_buckets(world: int) -> None:
    """Arrays of 64 MiB that links cannot lend: all of it passes through staging."""
    with coordinator() as address, workers(world, CODE, COORDINATOR=address, MIN_WORKERS=str(world)) as started:
        found = [worker.expect("facts", timeout=60.0)["shared"] for worker in started]
        assert [worker.wait() for worker in started] == [0] * world
    assert 0 < max(found) <= 2 * BUCKET
