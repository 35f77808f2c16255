"""A member dies or freezes in the middle of a collective, over each kind of link: who is named, how soon, and whose the
arrays are then (I7, I8).

The culprit strikes itself between two frames of a large array, or two marks, so that the act falls in the middle
whatever the machine.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from paceline.testing import coordinator
from support.processes import Worker, workers

pytestmark = pytest.mark.slow

SOON = 8.0
"""Seconds: sooner than `failure_timeout` after a death, and than any timeout of an operation after a freeze.
`test_failures` says how soon it is where nothing else runs."""

FAILURE_TIMEOUT = {signal.SIGKILL: 12.0, signal.SIGSTOP: 1.2}
"""Seconds. A death is told by the links."""

WORLD = 3

ARRAYS = {
    "all_reduce": "x, y = new(N), new(N); call = lambda: group.all_reduce(x, out=y); expected = 3.0 * ROW + 3000.0",
    "in_place": "x, y = new(N), new(N); call = in_place; expected = 3.0 * ROW + 3000.0",
    "broadcast": "x, y = new(N), new(N); call = broadcast; expected = ROW + 1000.0 * ROOT",
    "all_gather": "x, y = new(N), new(3 * N); call = lambda: group.all_gather(x, out=y); expected = np.hstack(ALL)",
    "reduce_scatter": (
        "x, y = new(3 * N), new(N); call = lambda: group.reduce_scatter(x, out=y); expected = 3.0 * ROW + 3000.0"
    ),
    "all_to_all": "x, y = new(3 * N), new(3 * N); call = lambda: group.all_to_all(x, out=y); expected = np.hstack(ALL)",
    "barrier": "x, y = new(N), new(N); call = group.barrier; expected = y",
    "send_recv": "x, y = new(N), new(N); call = around; expected = ALL[rank - 1]",
    "reduce": (
        "x, y = new(N), new(N); call = lambda: group.reduce(x, root=ROOT, out=y if rank == ROOT else None); "
        "expected = 3.0 * ROW + 3000.0 if rank == ROOT else y"
    ),
    "gather": (
        "x, y = new(N), new(3 * N); call = lambda: group.gather(x, root=ROOT, out=y if rank == ROOT else None); "
        "expected = np.hstack(ALL) if rank == ROOT else y"
    ),
    "scatter": (
        "x, y = new(3 * N), new(N); "
        "call = lambda: group.scatter(x.reshape(3, N) if rank == ROOT else None, root=ROOT, out=y); "
        "expected = ALL[ROOT]"
    ),
    "compressed": "x, y = new(N), new(N); call = lambda: group.all_reduce_compressed(x, 'bf16', out=y); expected = y",
}
"""What each is called with, and what must come of it; an argument is made of rows of N, the same one repeated."""

CODE = """
from paceline._links.member_link import MemberLink
from paceline.config import Config

Config.verdict_timeout = property(lambda _: 10.0)  # all wait for the one verdict, however late it is on a busy machine

N, ROOT, CULPRIT, STRIKE_IN = {n}, {root}, 2, 2
ROW = np.arange(N, dtype=np.float32) % 1021  # sums of these are exact
ALL = [ROW + 1000.0 * rank for rank in range(3)]

def broadcast():
    y[:] = x if rank == ROOT else -1.0
    group.broadcast(y, root=ROOT, out=y)

def in_place():
    y[:] = x
    group.all_reduce(y, out=y)

def around():
    steps = [lambda: group.send(x, (rank + 1) % 3), lambda: group.recv((rank - 1) % 3, out=y)]
    for step in steps if rank == 0 else steps[::-1]:
        step()

calls, strike_at = 0, -1

def counted(call):
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if calls == strike_at:
            emit("struck")
            os.kill(os.getpid(), signal.{act})
        return call(*args, **kwargs)
    return wrapped

for name in ("send", "lend", "recv", "mark", "await_mark"):  # these poll too, so halfway is not a number of frames
    setattr(MemberLink, name, counted(getattr(MemberLink, name)))

with paceline.join() as session:
    group, rank = session.group, session.rank
    new = (lambda size: group.empty(size, np.float32)) if {lent} else (lambda size: np.empty(size, np.float32))
    {arrays}
    x.reshape(-1, N)[:] = ALL[rank]
    y[:] = 0.0
    returned = 0

    def round():
        global returned
        if expected is not y:
            y.fill(-1.0)
        call()
        if not np.array_equal(y, expected):
            emit("garbage", found=y[y != expected][:5].tolist())
            os._exit(9)
        returned += 1

    try:
        for _ in range(STRIKE_IN):
            before = calls
            round()
        half = calls + max(1, (calls - before) // 2)
        session.barrier("linked")
        kinds = sorted({{link.kind for link in group._core.mesh._dialled if link.kind}})
        emit("joined", rank=rank, kinds=kinds)
        if rank == CULPRIT:
            strike_at = half
        while True:
            round()
    except paceline.PacelineError as error:
        emit_error(error)
    for array in (x, y):
        array.fill(77.0)  # they are this worker's again
    emit("filled", returned=returned)
    wait_for_go()
    emit("kept", kept=bool((x == 77.0).all() and (y == 77.0).all()))
    wait_for_go()
"""


def started(address: str, kind: str, collective: str, act: signal.Signals, memory: str) -> tuple[str, dict[str, str]]:
    """The program of the workers, and their environment."""
    lent = memory == "lent"
    mib = 8 if "3 * N" in ARRAYS[collective] else 16  # the larger of the arrays has 16 or 24 MiB
    root = 0 if lent else 2  # whose array the others read: a survivor's, or the culprit's
    code = CODE.format(n=(mib << 20) // 4, root=root, act=act.name, lent=lent, arrays=ARRAYS[collective])
    environment = {
        "COORDINATOR": address,
        "MIN_WORKERS": str(WORLD),
        "FAILURE_TIMEOUT": str(FAILURE_TIMEOUT[act]),
        "LINKS": kind,
    }
    return code, environment


def by_rank(started: list[Worker], kind: str) -> dict[int, Worker]:
    found = {}
    for worker in started:
        joined = worker.expect("joined", 40.0)
        assert joined["kinds"] == [kind]
        found[joined["rank"]] = worker
    return found


def check_errors(errors: list[dict[str, Any]], culprit: int) -> None:
    """All say the same of the same."""
    assert {error["event"] for error in errors} == {"error"}, errors
    assert {error["type"] for error in errors} == {"PeerLost"}
    assert {tuple(error["ranks"]) for error in errors} == {(culprit,)}
    assert len({error["text"] for error in errors}) == 1, errors
    assert f"rank {culprit}" in errors[0]["text"]


CASES = [
    (kind, act, memory)
    for kind in ("shm", "tcp", "grpc")
    for act, memory in [
        (signal.SIGKILL, "plain"),
        (signal.SIGSTOP, "lent"),
        *([(signal.SIGKILL, "lent"), (signal.SIGSTOP, "plain")] if kind == "shm" else []),  # to others it is all one
    ]
]


SOME_CASES = [
    ("shm", signal.SIGKILL, "lent"),
    ("shm", signal.SIGSTOP, "plain"),
    ("tcp", signal.SIGKILL, "plain"),
    ("grpc", signal.SIGSTOP, "lent"),
]
"""For collectives beside `all_reduce`, two by turns: each link, act and kind of memory, but not each with each."""

LIKE_OTHERS = {"in_place", "reduce", "gather", "scatter", "compressed"}
"""They use links as one of the others does: a frozen peer, or one that dies while it copies, will do."""


@pytest.mark.parametrize(
    ("collective", "kind", "act", "memory"),
    [
        (collective, *case)
        for n, collective in enumerate(ARRAYS)
        for case in (CASES if collective == "all_reduce" else SOME_CASES[n % 2 :: 2])
        if collective not in LIKE_OTHERS or case in SOME_CASES[1:3]
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.sampled(3)
def test_a_member_that_fails_mid_collective_is_named_in_time(
    kind: str, collective: str, act: signal.Signals, memory: str
) -> None:
    with coordinator() as address:
        code, environment = started(address, kind, collective, act, memory)
        with workers(WORLD, code, **environment) as processes:
            ranks = by_rank(processes, kind)
            culprit = ranks.pop(2)
            survivors = list(ranks.values())
            struck = culprit.expect("struck")["at"]
            errors = [worker.expect_any(20.0, "error") for worker in survivors]
            check_errors(errors, 2)
            assert max(error["at"] for error in errors) - struck < SOON
            for worker in survivors:
                worker.expect("filled")
            if act is signal.SIGSTOP:
                culprit.signal(signal.SIGCONT)
                woken = culprit.expect_any(20.0, "error")
                assert woken["event"] == "error", woken
                culprit.expect("filled")
                survivors.append(culprit)
            for worker in survivors:
                worker.go()
            for worker in survivors:
                assert worker.expect("kept")["kept"]
