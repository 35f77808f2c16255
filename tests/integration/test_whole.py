"""The all_reduce of arrays that are promised whole, between processes: in place or not, lent or not, with faults."""

from __future__ import annotations

import signal

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.timeout(120)

# WHOLE counts how often this way was taken, PROMISED how many frames this rank promised.
PRELUDE = """
from paceline.collectives.tasks import reducing
from paceline.links.shm.outgoing import ShmOutgoing

WHOLE, PROMISED = [], []
reduce_on, promise_on = reducing.reduce_whole, ShmOutgoing.promise
def counted(engine, call, *args):
    WHOLE.append(call.operation)
    reduce_on(engine, call, *args)
def promising(self, frame, deadline):
    done = promise_on(self, frame, deadline)
    PROMISED.append(done)
    return done
reducing.reduce_whole, ShmOutgoing.promise = counted, promising

def values(rank, n, dtype):
    return (np.random.default_rng(rank).standard_normal(n) * 100).astype(dtype)

def array(group, n, dtype, lent):
    return group.empty(n, dtype) if lent else np.empty(n, dtype)
"""

SAME_BITS = """
with paceline.join() as session:
    group, found = session.group, []
    rank = group.rank
    for n, dtype in ((300_001, "float32"), (1 << 20, "float32"), (99_999, "complex64"), (700_003, "float16")):
        for op in ("sum", "max", "mean"):
            if op == "max" and dtype == "complex64":
                continue
            whole, reducing.MOST_BYTES = reducing.MOST_BYTES, 0
            plain = group.all_reduce(values(rank, n, dtype), op=op, order="rank")
            reducing.MOST_BYTES = whole
            for _ in range(3):
                mine = array(group, n, dtype, lent(rank))
                mine[:] = values(rank, n, dtype)
                into = mine if in_place(rank) else array(group, n, dtype, lent(rank))
                group.all_reduce(mine, op=op, out=into)
                kept = into is mine or mine.tobytes() == values(rank, n, dtype).tobytes()
                found.append([n, dtype, op, into.tobytes() == plain.tobytes(), kept])
    emit("found", found=found, whole=len(WHOLE), promised=sum(PROMISED))
    group.barrier()
"""


def check(world: int, prepare: str, promises: list[bool]) -> None:
    """Sums are those of the schedule; each of these ranks has promised its arrays, or has not."""
    code = PRELUDE + prepare + SAME_BITS
    with coordinator() as address, workers(world, code, COORDINATOR=address, MIN_WORKERS=str(world)) as started:
        told = [worker.expect("found", timeout=60.0) for worker in started]
        assert [worker.wait() for worker in started] == [0] * world
    for each in told:
        assert [row for row in each["found"] if not (row[3] and row[4])] == []
        assert each["whole"] > 0
    assert sorted(each["promised"] > 0 for each in told) == sorted(promises)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("lent", ["True", "False", "rank != 1"])
@pytest.mark.parametrize("in_place", ["True", "False", "rank != 0"])
def test_the_bits_are_those_of_rank_order(world: int, lent: str, in_place: str) -> None:
    promises = [bool(eval(lent) and eval(in_place)) for rank in range(world)]
    check(world, f"lent, in_place = lambda rank: {lent}, lambda rank: {in_place}", promises)


def test_whom_nothing_can_be_promised_is_lent_chunk_and_total() -> None:
    """A rank may promise its array to one and not to another."""
    prepare = """
lent = in_place = lambda rank: True
turns = []
def grudging(self, frame, deadline):
    turns.append(1)
    return len(turns) % 3 > 0 and promising(self, frame, deadline)
ShmOutgoing.promise = grudging
"""
    check(3, prepare, [True] * 3)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("when", ["promise", "fulfil"])
def test_a_rank_that_dies_or_freezes_in_the_middle(when: str, sig: signal.Signals) -> None:
    code = (
        PRELUDE
        + """
with paceline.join() as session:
    group = session.group
    mine = group.empty(1 << 20, np.float32)
    mine[:] = 1
    group.all_reduce(mine, out=mine)
    assert WHOLE and all(PROMISED)
    if group.rank == 1:
        act, left = ShmOutgoing.WHEN, [2]
        def last(self, *args):
            left[0] -= 1
            if not left[0]:
                emit("dies")
                os.kill(os.getpid(), SIGNAL)
            return act(self, *args)
        ShmOutgoing.WHEN = last
    try:
        group.all_reduce(mine, out=mine)
    except paceline.PeerLost as error:
        emit_error(error)
    mine[:] = 2  # it is the caller's again
"""
    ).replace("SIGNAL", str(int(sig)))
    code = code.replace("WHEN", when)
    settings = {"FAILURE_TIMEOUT": "1.0"}
    with coordinator() as address, workers(3, code, COORDINATOR=address, MIN_WORKERS="3", **settings) as started:
        told = [worker.expect_any(timeout=30.0) for worker in started]
        assert sorted(each["event"] for each in told) == ["dies", "error", "error"]
        assert [each["ranks"] for each in told if each["event"] == "error"] == [[1], [1]]
