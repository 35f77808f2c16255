"""Measures a sum through the engine "mpi" beside plain mpi4py, in the same two ranks. `-s` prints."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from figures import QUIET
from support.mpi import PRELUDE, mpirun

pytestmark = [pytest.mark.needs(what="peers"), pytest.mark.timeout(300)]

SIZES = (1, 4, 16, 64)
"""MiB."""

WAYS = ("Allreduce(x, y)", "Allreduce(IN_PLACE, x)", "Iallreduce(x, y), ring", "engine")

CODE = f"""
from paceline.engines import Peer
from paceline_mpi import MpiEngine, load_mpi

mpi = load_mpi()
world = mpi.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
engine = MpiEngine()
engine.open(rank, [Peer(each, str(each), "localhost", "127.0.0.1:1") for each in range(size)], 10.0)
mine = np.zeros(1024, np.uint8)
contact = engine.contact(0.0)
mine[: len(contact)] = np.frombuffer(contact, np.uint8)
contacts = np.empty((size, 1024), np.uint8)
world.Allgather(mine, contacts)
engine.connect([each.tobytes().rstrip(b"\\0") for each in contacts])
engine.await_ready(time.monotonic() + 10)
plain = world.Dup()

def polled(request):
    while not request.Test():
        pass

calls = dict(zip({WAYS!r}, (
    lambda x, y: plain.Allreduce(x, y),
    lambda x, y: plain.Allreduce(mpi.IN_PLACE, x),
    lambda x, y: polled(plain.Iallreduce(x, y)),
    lambda x, y: engine.all_reduce(x).wait(time.monotonic() + 60),
)))
for mib in {SIZES!r}:
    x, y = np.ones(mib << 18, np.float32), np.ones(mib << 18, np.float32)
    times = {{way: [] for way in calls}}
    for turn in range(3 + max(15, 192 // mib)):  # in turns, because the machine's speed changes
        for way, call in calls.items():
            x[:] = 1
            plain.Barrier()
            start, cpu = time.perf_counter(), time.process_time()
            call(x, y)
            if turn >= 3:
                times[way].append((time.perf_counter() - start, time.process_time() - cpu))
            assert (y if "y" in way else x)[-1] == size
    emit("times", mib=mib, times=times)
engine.close(time.monotonic() + 10)
"""


def test_a_sum_by_the_engine_keeps_up_with_plain_mpi4py(tmp_path: Path) -> None:
    script = tmp_path / "measure.py"
    script.write_text(PRELUDE + CODE)
    with mpirun(2, [str(script)], tmp_path) as run:
        assert run.wait(240) == 0, run.stderr
    for events in zip(*(run.of(rank, "times") for rank in range(2)), strict=True):
        mib = events[0]["mib"]
        print(f"\n{mib} MiB, W=2; medians by wall clock and CPU time, and speed relative to the first in its turn:")
        ratios: dict[str, list[float]] = {}
        usual = _slowest([event["times"][WAYS[0]] for event in events])
        for way in WAYS:
            found = _slowest([event["times"][way] for event in events])
            wall, cpu = (statistics.median(column) * 1e3 for column in zip(*found, strict=True))
            pairs = list(zip(usual, found, strict=True))
            ratios[way] = [statistics.median(theirs[clock] / mine[clock] for theirs, mine in pairs) for clock in (0, 1)]
            print(f"  {way:<24} {wall:8.2f} ms {ratios[way][0]:.2f}  CPU {cpu:8.2f} ms {ratios[way][1]:.2f}")
        # One of the two clocks is enough: other load lengthens the wall clock, and a cold cache the CPU time.
        if mib >= 4:
            assert max(ratios["engine"]) >= (0.9 if QUIET else 0.4)


def _slowest(ranks: list[list[list[float]]]) -> list[tuple[float, float]]:
    """(wall clock of the slowest rank, mean CPU time of a rank) of each turn."""
    return [
        (max(wall for wall, _ in turn), statistics.mean(cpu for _, cpu in turn)) for turn in zip(*ranks, strict=True)
    ]
