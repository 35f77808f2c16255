"""Leaving: what was sent is delivered, blocked threads wake, an interrupt does not leave a member behind."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from unit.elastic.solo import Training

import paceline
from paceline.config import Config
from paceline.testing import coordinator
from pacelinepb.v1 import admin_pb2, admin_pb2_grpc
from support.processes import workers


def join(address: str, size: int) -> list[paceline.Session]:
    """Sessions of this process, in rank order."""

    def one(_: int) -> paceline.Session:
        return paceline.join(address, job="leaving", min_workers=size, config=Config(failure_timeout=1.0))

    with ThreadPoolExecutor(size) as pool:
        return sorted(pool.map(one, range(size)), key=lambda session: session.rank)


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.group.recv(1, timeout=30.0),
        lambda session: session.group.all_reduce(np.ones(3), timeout=30.0),
        lambda session: session.barrier("b", timeout=30.0),
        lambda session: session.store.get("missing", timeout=30.0),
    ],
    ids=["recv", "all_reduce", "barrier", "store"],
)
def test_leave_wakes_a_thread_blocked_in_a_call(call: object) -> None:
    with coordinator() as address:
        a, b = join(address, 2)
        caught: list[BaseException] = []
        entered = threading.Event()

        def block() -> None:
            entered.set()
            try:
                call(a)  # type: ignore[operator]
            except paceline.PacelineError as error:
                caught.append(error)

        blocked = threading.Thread(target=block)
        blocked.start()
        entered.wait()
        a.leave()
        blocked.join(20.0)  # the call by itself would last longer
        assert not blocked.is_alive()
        assert len(caught) == 1
        b.leave()


@pytest.mark.slow
def test_leave_waits_until_a_slow_peer_has_received_the_data() -> None:
    sender = """
with paceline.join() as session:
    emit("joined", rank=session.rank)
    if session.rank == 0:
        session.group.broadcast(np.ones(44 << 20, np.uint8))
    else:
        wait_for_go()
        emit("sum", total=int(session.group.broadcast(None).sum()))
emit("left", rank=session.rank)
"""
    with coordinator() as address, workers(2, sender, COORDINATOR=address, MIN_WORKERS="2") as started:
        ranks = {worker.expect("joined")["rank"]: worker for worker in started}
        # More than the links hold, and for longer than the goodbye is waited for: rank 0 must stay until it is taken.
        with pytest.raises(AssertionError, match="no 'left'"):
            ranks[0].expect("left", timeout=3.0)
        ranks[1].go()
        assert ranks[1].expect("sum")["total"] == 44 << 20
        for worker in ranks.values():
            worker.expect("left")


def test_recv_from_any_rank_keeps_waiting_after_one_peer_left() -> None:
    with coordinator() as address:
        a, b, c = join(address, 3)
        c.group.send(np.array([2.0]), 0)  # over a link that only c has dialled
        c.leave()
        assert a.group.recv()[1] == 2  # a dials c now: its door is shut
        with pytest.raises(paceline.OperationTimeout):
            a.group.recv(timeout=0.5)
        b.group.send(np.array([1.0]), 0)
        assert a.group.recv()[1] == 1
        a.leave()
        b.leave()


@pytest.mark.parametrize("where", ["session.barrier('b')", "session.store.get('k')", "session.group.recv(1)"])
def test_ctrl_c_in_a_blocked_call_raises_peer_raised_at_the_other(where: str) -> None:
    code = f"""
try:
    with paceline.join() as session:
        emit("joined", rank=session.rank)
        if session.rank == 0:
            {where}
        else:
            session.barrier("never", timeout=30.0)
except KeyboardInterrupt:
    emit("interrupted")
except paceline.PacelineError as error:
    emit_error(error)
"""
    with coordinator() as address, workers(2, code, COORDINATOR=address, MIN_WORKERS="2") as started:
        ranks = {worker.expect("joined")["rank"]: worker for worker in started}
        ranks[0].signal(signal.SIGINT)
        ranks[0].expect("interrupted")
        error = ranks[1].expect("error")
        assert (error["type"], error["ranks"]) == ("PeerRaised", [0])
        assert "KeyboardInterrupt" in error["text"]
        assert [worker.wait() for worker in started] == [0, 0]


def test_ctrl_c_while_waiting_in_join_ends_at_once() -> None:
    code = """
try:
    emit("joining")
    paceline.join(min_workers=2, timeout=30.0)
except KeyboardInterrupt:
    emit("interrupted")
"""
    with coordinator() as address, workers(1, code, COORDINATOR=address) as (worker,):
        worker.expect("joining")
        worker.signal(signal.SIGINT)
        worker.expect("interrupted", 20.0)  # sooner than `join` would give up
        assert worker.wait() == 0


@pytest.mark.parametrize(
    "code", ["interrupt(); paceline.join(min_workers=2)", "s = paceline.join(); interrupt(); s.group.recv(0)"]
)
def test_an_uncaught_ctrl_c_shows_no_stack_trace(code: str) -> None:
    prelude = """
def interrupt():                                    # as soon as join has come far enough to answer for Ctrl-C
    def wait():
        while sys.excepthook is sys.__excepthook__:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=wait, daemon=True).start()
"""
    with coordinator() as address, workers(1, prelude + code, COORDINATOR=address) as (worker,):
        assert worker.wait() == -signal.SIGINT
        worker.close()
        assert worker.stderr == ""


def test_another_uncaught_error_keeps_its_traceback() -> None:
    code = "paceline.join()\nraise KeyError('mine')"
    with coordinator() as address, workers(1, code, COORDINATOR=address) as (worker,):
        assert worker.wait() == 1
        worker.close()
        assert "Traceback" in worker.stderr
        assert "KeyError: 'mine'" in worker.stderr


def test_an_uncaught_paceline_error_shows_only_the_script_line() -> None:
    code = "s = paceline.join()\ns.group.send(np.ones(1), 7)"
    with coordinator() as address, workers(1, code, COORDINATOR=address) as (worker,):
        assert worker.wait() == 1
        worker.close()
        first, second, *rest = worker.stderr.splitlines()
        assert first.startswith("paceline: ")
        assert "7" in first
        assert second.startswith("  File ")
        assert rest[-1].startswith("  InvalidRank")
        assert "Traceback" not in worker.stderr


def test_the_last_checkpoint_of_a_leaving_member_is_an_event(tmp_path: Path) -> None:
    with coordinator() as address, grpc.insecure_channel(address) as channel:
        with paceline.join(address, job="leaving") as session:
            Training().run(session, 3, checkpoint_dir=tmp_path)  # written when all steps are done
        request = admin_pb2.ListEventsRequest(job="leaving", most=100)
        events = admin_pb2_grpc.AdminServiceStub(channel).ListEvents(request, timeout=10.0).events
        (text,) = [event.text for event in events if event.kind == "checkpoint"]
        assert text.startswith("checkpoint of step 3 is complete, in ")
