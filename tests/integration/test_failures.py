"""A member dies, freezes, breaks the protocol or raises: every other one ends with the same typed error (I7, I8)."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from paceline.testing import coordinator
from support.processes import Worker, workers

pytestmark = pytest.mark.alone

BLOCKED = """
with paceline.join() as session:
    session.group.all_reduce(np.ones(1000))
    session.barrier("linked")
    emit("joined", rank=session.rank)
    try:
        if session.rank == 2:
            {culprit}
        while True:
            session.group.all_reduce(np.ones(1000))
    except paceline.PacelineError as error:
        emit_error(error)
"""


def by_rank(started: list[Worker]) -> dict[int, Worker]:
    return {worker.expect("joined")["rank"]: worker for worker in started}


def errors_of(ranks: dict[int, Worker], culprit: int, timeout: float = 20.0) -> list[dict[str, Any]]:
    return [worker.expect("error", timeout) for rank, worker in ranks.items() if rank != culprit]


def assert_all_name(errors: list[dict[str, Any]], kind: str, culprit: int) -> None:
    assert {error["type"] for error in errors} == {kind}
    assert {tuple(error["ranks"]) for error in errors} == {(culprit,)}
    assert len({error["text"] for error in errors}) == 1
    assert f"rank {culprit}" in errors[0]["text"]


def test_a_killed_member_raises_peer_lost_within_a_second() -> None:
    code = BLOCKED.format(culprit="wait_for_go()")
    with coordinator() as address, workers(4, code, COORDINATOR=address, MIN_WORKERS="4") as started:
        ranks = by_rank(started)
        killed = ranks[2].signal(signal.SIGKILL)
        errors = errors_of(ranks, 2)
        assert_all_name(errors, "PeerLost", 2)
        assert f"pid {ranks[2].process.pid}" in errors[0]["text"]
        assert max(error["at"] for error in errors) - killed < 1.0


def test_a_frozen_member_raises_peer_lost_soon_after_failure_timeout() -> None:
    code = BLOCKED.format(culprit="wait_for_go()")
    environment = {"MIN_WORKERS": "4", "FAILURE_TIMEOUT": "1.2"}
    with coordinator() as address, workers(4, code, COORDINATOR=address, **environment) as started:
        ranks = by_rank(started)
        frozen = ranks[2].signal(signal.SIGSTOP)
        errors = errors_of(ranks, 2)
        assert_all_name(errors, "PeerLost", 2)
        assert max(error["at"] for error in errors) - frozen < 2.2


SEND = """
            import struct, zlib
            from paceline._links.base import Purpose
            from paceline._links.frame import Frame, FrameKind, encode
            data = {data}
            link = session.group._core.mesh.link(3, Purpose.COLLECTIVE)
            link.stream.put(data, time.monotonic() + 5, session.group._core.mesh.fault)
            wait_for_go()
"""


def test_a_frame_of_unknown_kind_raises_peer_broke_protocol() -> None:
    """Its checksum is right, so it came as it was sent."""
    data = """encode(Frame(FrameKind.DATA, session.group._core.mesh.generation, 1, 0, b"", b""))
            data = data[:1] + bytes([127]) + data[2:-4]
            data += struct.pack("<I", zlib.crc32(data))"""
    code = BLOCKED.format(culprit=SEND.format(data=data).strip())
    with coordinator() as address, workers(4, code, COORDINATOR=address, MIN_WORKERS="4") as started:
        assert_all_name(errors_of(by_rank(started), 2), "PeerBrokeProtocol", 2)


def test_corrupted_bytes_raise_peer_lost_for_the_link() -> None:
    code = BLOCKED.format(culprit=SEND.format(data="os.urandom(500)").strip())
    with coordinator() as address, workers(4, code, COORDINATOR=address, MIN_WORKERS="4") as started:
        errors = errors_of(by_rank(started), 2)
        assert {error["type"] for error in errors} == {"PeerLost"}
        assert len({error["text"] for error in errors}) == 1
        assert set(errors[0]["ranks"]) <= {2, 3}


def test_a_members_exception_raises_peer_raised_at_the_others() -> None:
    code = BLOCKED.format(culprit='raise ValueError("no such batch")')
    with coordinator() as address, workers(4, code, COORDINATOR=address, MIN_WORKERS="4") as started:
        ranks = by_rank(started)
        errors = errors_of(ranks, 2)
        assert_all_name(errors, "PeerRaised", 2)
        assert "ValueError: no such batch" in errors[0]["text"]
        assert ranks[2].wait() == 1
        assert "no such batch" in ranks[2].stderr


def test_a_member_that_leaves_during_a_collective_raises_peer_lost() -> None:
    code = BLOCKED.format(culprit="session.leave(); sys.exit(0)")
    with coordinator() as address, workers(4, code, COORDINATOR=address, MIN_WORKERS="4") as started:
        errors = errors_of(by_rank(started), 2)
        assert_all_name(errors, "PeerLost", 2)
        assert "left" in errors[0]["text"]


def test_a_death_between_calls_fails_the_next_call_at_once() -> None:
    code = """
with paceline.join() as session:
    session.barrier("all here")
    emit("joined", rank=session.rank)
    wait_for_go()
    start = time.monotonic()
    try:
        session.group.all_reduce(np.ones(3))
    except paceline.PacelineError as error:
        emit("took", seconds=time.monotonic() - start)
        emit_error(error)
    try:
        session.barrier("again")
    except paceline.PacelineError as error:
        emit_error(error)
"""
    with coordinator() as address, workers(3, code, COORDINATOR=address, MIN_WORKERS="3") as started:
        ranks = by_rank(started)
        ranks[2].signal(signal.SIGKILL)
        ranks[2].wait()
        for rank in (0, 1):
            ranks[rank].go()
        for rank in (0, 1):
            assert ranks[rank].expect("took")["seconds"] < 2.5  # sooner than the failure timeout of 3 s
            assert ranks[rank].expect("error")["ranks"] == [2]
            again = ranks[rank].expect("error")
            assert (again["type"], again["ranks"]) == ("PeerLost", [2])


@pytest.mark.parametrize(
    ("mine", "theirs", "facts"),
    [
        ("all_reduce(np.ones(4, np.float32))", "all_reduce(np.ones(4), op='sum')", ["float32[4]", "float64[4]"]),
        ("all_reduce(np.ones(4))", "all_reduce(np.ones(5))", ["float64[4]", "float64[5]"]),
        ("all_reduce(np.ones(4), op='sum')", "all_reduce(np.ones(4), op='max')", ["op=sum", "op=max"]),
        ("broadcast(np.ones(4), root=0)", "broadcast(np.ones(4), root=1)", ["broadcast root=1"]),
        ("all_reduce(np.ones(4))", "broadcast(np.ones(4))", ["all_reduce", "broadcast"]),
    ],
    ids=["dtype", "shape", "op", "root", "kind"],
)
def test_a_collective_mismatch_names_both_calls(mine: str, theirs: str, facts: list[str]) -> None:
    code = f"""
with paceline.join() as session:
    try:
        if session.rank == 1:
            session.group.{theirs}
        else:
            session.group.{mine}
        session.group.barrier()
    except paceline.PacelineError as error:
        emit_error(error)
"""
    with coordinator() as address, workers(3, code, COORDINATOR=address, MIN_WORKERS="3") as started:
        errors = [worker.expect("error") for worker in started]
    assert {error["type"] for error in errors} == {"CollectiveMismatch"}
    assert len({error["text"] for error in errors}) == 1
    for fact in [*facts, "rank 1"]:
        assert fact in errors[0]["text"]


def test_a_timeout_names_the_missing_rank() -> None:
    code = """
with paceline.join() as session:
    emit("joined", rank=session.rank)
    try:
        if session.rank == 1:
            wait_for_go()
        session.group.all_reduce(np.ones(4), timeout=0.5)
    except paceline.PacelineError as error:
        emit_error(error)
"""
    with coordinator() as address, workers(3, code, COORDINATOR=address, MIN_WORKERS="3") as started:
        ranks = by_rank(started)
        errors = errors_of(ranks, 1)
        assert {error["type"] for error in errors} == {"OperationTimeout"}
        assert len({error["text"] for error in errors}) == 1
        assert "rank 1" in errors[0]["text"]
        ranks[1].go()
        assert ranks[1].expect("error")["type"] == "OperationTimeout"


def test_barrier_mismatch_names_both_operations() -> None:
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
