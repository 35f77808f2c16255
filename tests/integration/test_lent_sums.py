"""Sums of arrays that some ranks lend and others copy, between processes: the bits are those of rank order."""

from __future__ import annotations

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SAME_BITS = """
def values(rank, n, dtype):
    scale = 100 if dtype == "int32" else 1
    return (np.random.default_rng(rank).standard_normal(n) * scale).astype(dtype)

def array(group, n, dtype, lent):
    return group.empty(n, dtype) if lent else np.empty(n, dtype)

with paceline.join() as session:
    group, wrong = session.group, []
    for n, dtype in ((3 * 1024 * 1024 + 5, "float32"), (700_001, "float64"), (600_000, "int32"), (900_000, "float16")):
        for op in ("sum", "max") if dtype == "int32" else ("sum", "max", "mean"):
            mine, into = (array(group, n, dtype, LENT(group.rank)) for _ in range(2))
            mine[:] = values(group.rank, n, dtype)
            group.all_reduce(mine, op=op, out=into)
            untouched = (mine == values(group.rank, n, dtype)).all()
            in_rank_order = group.all_reduce(mine, op=op, order="rank").tobytes()
            group.all_reduce(mine, op=op, out=mine)
            if not (untouched and into.tobytes() == mine.tobytes() == in_rank_order):
                wrong.append([n, dtype, op])
    emit("compared", wrong=wrong)
    group.barrier()
"""


def check(world: int, prepare: str) -> None:
    code = prepare + SAME_BITS
    with coordinator() as address, workers(world, code, COORDINATOR=address, MIN_WORKERS=str(world)) as started:
        assert [worker.expect("compared", timeout=60.0)["wrong"] for worker in started] == [[]] * world
        assert [worker.wait() for worker in started] == [0] * world


@pytest.mark.parametrize(
    ("world", "lent"), [(2, "True"), (2, "rank != 1"), (3, "True"), (3, "False"), (3, "rank != 1")]
)
@pytest.mark.sampled(2)
def test_sums_of_lent_and_copied_arrays_follow_rank_order(world: int, lent: str) -> None:
    check(world, f"LENT = lambda rank: {lent}")


def test_a_rank_that_cannot_lend_memory_copies_its_array() -> None:
    """Staging holds six frames, as among many neighbours."""
    check(
        3,
        """
from paceline._collectives import tasks
from paceline._links.shm.outgoing import ShmOutgoing

tasks.segment = lambda dtype, engine: (1 << 20) // dtype.itemsize
announce, init = ShmOutgoing._announce, ShmOutgoing.__init__
def small(self, *args):
    init(self, *args)
    self._ring = 6 << 20
ShmOutgoing.__init__ = small
ranks = []
ShmOutgoing._announce = lambda self, segment: ranks[0] != 1 and announce(self, segment)
LENT = lambda rank: ranks.append(rank) or True
""",
    )


SEVERAL = """
def array(group, n):
    return group.empty(n, "int32") if LENT(group.rank) else np.empty(n, "int32")

with paceline.join() as session:
    group, wrong = session.group, []
    rank, base = group.rank, np.arange(ELEMENTS, dtype="int32")
    for turn in range(3):
        x, y, told = (array(group, base.size) for _ in range(3))
        x[:], y[:], told[:] = base + rank, base * (rank + 1), base * rank + turn
        works = [
            group.all_reduce(x, out=x, async_op=True),
            group.broadcast(told, root=1, out=told, async_op=True),
            group.all_reduce(y, out=y, async_op=True),
            group.all_gather(base[: 1 + 3_000_000 * turn] + rank, async_op=True),
        ]
        *_, gathered = (work.wait(60.0) for work in works)
        part = base[: 1 + 3_000_000 * turn]
        if not ((x == 2 * base + 1).all() and (y == 3 * base).all() and (told == base + turn).all()
                and (gathered == np.concatenate((part, part + 1))).all()):
            wrong.append(turn)
    emit("compared", wrong=wrong)
    group.barrier()
"""
"""An all_reduce sends more frames than staging holds at a time, beside other collectives, whose frames are shorter."""


@pytest.mark.parametrize(
    ("links", "lent", "mib"),
    [("shm", "True", 32), ("shm", "False", 24), ("shm", "rank", 32), ("tcp", "False", 32), ("grpc", "False", 24)],
)
@pytest.mark.sampled(2)
def test_collectives_with_frames_of_all_lengths_can_share_a_link(links: str, lent: str, mib: int) -> None:
    code = f"LENT = lambda rank: {lent}; ELEMENTS = {mib << 18} + 3" + SEVERAL
    settings = {"MIN_WORKERS": "2", "LINKS": links}
    with coordinator() as address, workers(2, code, COORDINATOR=address, **settings) as started:
        assert [worker.expect("compared", timeout=60.0)["wrong"] for worker in started] == [[]] * 2
        assert [worker.wait() for worker in started] == [0] * 2
