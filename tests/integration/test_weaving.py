"""The woven all_reduce and barriers by marks, between processes: whatever is lent, and with faults in the middle."""

from __future__ import annotations

import signal

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.timeout(120)

# Arrays above a few hundred KiB are woven, as if all ranks had cores of their own; WOVEN counts how often that was so.
PRELUDE = """
from paceline.collectives import weaving
from paceline.collectives.tasks import reducing
from paceline.links.shm.outgoing import ShmOutgoing

reducing._WOVEN_BYTES = 1 << 18
reducing.segment = lambda dtype, engine: (1 << 20) // dtype.itemsize
os.cpu_count = lambda: 64
WOVEN = []
weave_on = weaving.Weaver.run
def counted(self):
    WOVEN.append(self._call.operation)
    weave_on(self)
weaving.Weaver.run = counted

def values(rank, n, dtype):
    return np.random.default_rng(rank).standard_normal(n).astype(dtype)

def array(group, n, dtype, lent):
    return group.empty(n, dtype) if lent else np.empty(n, dtype)
"""

SAME_BITS = """
with paceline.join() as session:
    group, found = session.group, []
    for n, dtype in ((3 * 1024 * 1024 + 5, "float32"), (700_001, "float64"), (600_000, "int32"), (900_000, "float16")):
        for lent in LENT:
            for op in ("sum", "max", "mean"):
                if op == "mean" and dtype == "int32":
                    continue
                mine = array(group, n, dtype, lent(group.rank))
                mine[:] = values(group.rank, n, dtype) * (100 if dtype == "int32" else 1)
                into = array(group, n, dtype, lent(group.rank))
                group.all_reduce(mine, op=op, out=into)
                assert (mine == (values(group.rank, n, dtype) * (100 if dtype == "int32" else 1)).astype(dtype)).all()
                reducing._WOVEN_BYTES, before = 1 << 60, reducing._WOVEN_BYTES
                plain = group.all_reduce(mine, op=op, order="rank")
                reducing._WOVEN_BYTES = before
                same = into.tobytes() == plain.tobytes()
                group.all_reduce(mine, op=op, out=mine)
                found.append([n, dtype, op, same, into.tobytes() == mine.tobytes()])
    emit("found", found=found, woven=len(WOVEN))
    group.barrier()
"""


def check(world: int, prepare: str, *, woven: bool) -> None:
    """Sums are those of another schedule, and some were woven, or none."""
    code = PRELUDE + prepare + SAME_BITS
    with coordinator() as address, workers(world, code, COORDINATOR=address, MIN_WORKERS=str(world)) as started:
        for worker in started:
            told = worker.expect("found", timeout=60.0)
            assert [row for row in told["found"] if not (row[3] and row[4])] == []
            assert (told["woven"] > 0) == woven
        assert [worker.wait() for worker in started] == [0] * world


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("lent", "woven"),
    [("lambda rank: True", True), ("lambda rank: False", False), ("lambda rank: rank != 1", False)],
    ids=["all", "none", "not rank 1"],
)
def test_the_bits_are_those_of_rank_order(world: int, lent: str, woven: bool) -> None:
    check(world, f"LENT = [{lent}]", woven=woven)


def test_whom_nothing_can_be_promised_gets_it_when_it_is_made() -> None:
    """Of three, rank 0 promises nothing, and rank 1 nothing from its second segment on."""
    prepare = """
promise, left = ShmOutgoing.promise, [10_000]
def grudging(self, frame, deadline):
    left[0] -= 1
    return left[0] >= 0 and promise(self, frame, deadline)
ShmOutgoing.promise = grudging
LENT = [lambda rank: left.__setitem__(0, {0: 0, 1: 2, 2: 10_000}[rank]) or True]
"""
    check(3, prepare, woven=True)


def test_a_rank_that_can_hand_over_no_memory_copies_what_it_said_it_could_lend() -> None:
    """Staging holds the six frames that it has room for among many neighbours too."""
    prepare = """
announce, init = ShmOutgoing._announce, ShmOutgoing.__init__
def small(self, *args):
    init(self, *args)
    self._ring = 6 << 20
ShmOutgoing.__init__ = small
ranks = []
ShmOutgoing._announce = lambda self, segment: ranks[0] != 1 and announce(self, segment)
LENT = [lambda rank: ranks.append(rank) or True]
"""
    check(3, prepare, woven=True)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_freezes_between_two_pieces(sig: signal.Signals) -> None:
    code = (
        PRELUDE
        + """
with paceline.join() as session:
    group = session.group
    mine = group.empty(8 << 20, np.float32)
    mine[:] = 1
    group.all_reduce(mine, out=mine)
    if group.rank == 1:
        fulfil, left = ShmOutgoing.fulfil, [5]
        def last(self):
            left[0] -= 1
            if not left[0]:
                emit("dies")
                os.kill(os.getpid(), SIGNAL)
            fulfil(self)
        ShmOutgoing.fulfil = last
    try:
        group.all_reduce(mine, out=mine)
    except paceline.PeerLost as error:
        emit_error(error)
    mine[:] = 2  # it is the caller's again
"""
    ).replace("SIGNAL", str(int(sig)))
    settings = {"FAILURE_TIMEOUT": "1.0"}
    with coordinator() as address, workers(3, code, COORDINATOR=address, MIN_WORKERS="3", **settings) as started:
        told = [worker.expect_any(timeout=30.0) for worker in started]
        assert sorted(each["event"] for each in told) == ["dies", "error", "error"]
        for each in told:
            if each["event"] == "error":
                assert each["ranks"] == [1], each


def test_barriers_by_marks_tell_what_another_called() -> None:
    """One rank calls something else that waits for nobody: the others' barrier ends with both names."""
    code = """
with paceline.join() as session:
    group = session.group
    for _ in range(20):
        group.barrier()
    try:
        if group.rank == 0:
            group.broadcast(np.ones(3), root=0)
        group.barrier()
        emit("passed")
    except paceline.CollectiveMismatch as error:
        emit_error(error)
"""
    with coordinator() as address, workers(2, code, COORDINATOR=address, MIN_WORKERS="2") as started:
        for worker in started:
            told = worker.expect("error")
            assert "called barrier" in told["text"]
            assert "called broadcast" in told["text"]
