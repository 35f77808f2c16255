"""The coordinator dies and comes back: the ring goes on, sessions resume, and generations grow (I3)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.process_coordinator import server_process
from support.ports import free_port
from support.processes import Worker, workers
from support.python_process import Process

GOING_ON = """
with paceline.join() as session:
    session.store.set(f"from {session.rank}", b"before")
    emit("joined", rank=session.rank, generation=session.generation)
    wait_for_go()
    emit("sum", total=float(session.group.all_reduce(np.ones(1000))[0]))      # nobody at the coordinator's address
    wait_for_go()
    session.barrier("after the restart", timeout=20.0)
    emit("passed", value=session.store.get(f"from {1 - session.rank}", timeout=5.0).decode())
"""


@contextmanager
def coordinator_process(listen: str, state: Path) -> Iterator[tuple[Process, str]]:
    with server_process("--listen", listen, "--state", str(state), stderr=2) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]


def expect_all(started: list[Worker], event: str) -> list[dict[str, object]]:
    return [worker.expect(event) for worker in started]


def test_collectives_work_during_an_outage_and_sessions_resume(tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    with (
        coordinator_process(f"127.0.0.1:{free_port()}", state) as (first, address),
        workers(2, GOING_ON, COORDINATOR=address, MIN_WORKERS="2", FAILURE_TIMEOUT="2") as started,
    ):
        assert {event["generation"] for event in expect_all(started, "joined")} == {1}
        first.send_signal(signal.SIGKILL)
        first.wait()
        for worker in started:
            worker.go()
        assert {event["total"] for event in expect_all(started, "sum")} == {2.0}
        with coordinator_process(address, state):
            for worker in started:
                worker.go()
            assert {event["value"] for event in expect_all(started, "passed")} == {"before"}
            assert [worker.wait() for worker in started] == [0, 0]
            with workers(2, GOING_ON, COORDINATOR=address, MIN_WORKERS="2") as later:
                assert {event["generation"] for event in expect_all(later, "joined")} == {2}


def test_a_session_resumes_after_failed_and_stalled_name_lookups(tmp_path: Path) -> None:
    code = """
    import errno, socket, threading

    real, questions = socket.getaddrinfo, threading.Semaphore(0)
    trouble = [socket.gaierror(socket.EAI_NONAME, "no such name for now"), OSError(errno.EMFILE, "too many files")]

    def cut_off(host, *arguments, **options):
        if host == "localhost" and options.get("flags") == 0:
            questions.release()
            if trouble:
                raise trouble.pop()
            threading.Event().wait()  # longer than anybody waits
        return real(host, *arguments, **options)

    with paceline.join() as session:
        socket.getaddrinfo = cut_off
        emit("joined")
        for _ in range(4):
            questions.acquire()
        socket.getaddrinfo = real
        emit("again")
        session.barrier("b", timeout=20.0)
        emit("passed")
    """
    state = tmp_path / "state.db"
    with coordinator_process(f"127.0.0.1:{free_port()}", state) as (first, address):
        named = f"localhost:{address.rpartition(':')[2]}"
        with workers(1, code, COORDINATOR=named, MIN_WORKERS="1") as (worker,):
            worker.expect("joined")
            first.send_signal(signal.SIGKILL)
            first.wait()
            worker.expect("again")
            with coordinator_process(address, state):
                worker.expect("passed")
                assert worker.wait() == 0


def test_coordinator_calls_raise_orphaned_error_but_collectives_work(tmp_path: Path) -> None:
    code = """
    with paceline.join() as session:
        emit("joined")
        wait_for_go()
        try:
            session.barrier("b", timeout=30.0)
        except paceline.PacelineError as error:
            emit_error(error)
        emit("sum", total=float(session.group.all_reduce(np.ones(10))[0]))
    """
    with (
        coordinator_process(f"127.0.0.1:{free_port()}", tmp_path / "one.db") as (first, address),
        workers(2, code, COORDINATOR=address, MIN_WORKERS="2", REJOIN_TIMEOUT="1") as started,
    ):
        expect_all(started, "joined")
        first.send_signal(signal.SIGKILL)
        first.wait()
        for worker in started:
            worker.go()
        assert {event["type"] for event in expect_all(started, "error")} == {"OrphanedError"}
        assert {event["total"] for event in expect_all(started, "sum")} == {2.0}
        assert [worker.wait() for worker in started] == [0, 0]


def _told_of_lost_state(tmp_path: Path, code: str) -> list[dict[str, object]]:
    """The errors of a worker whose coordinator is replaced by one without its job, once it has said "ready"."""
    with (
        coordinator_process(f"127.0.0.1:{free_port()}", tmp_path / "one.db") as (first, address),
        workers(1, code, COORDINATOR=address) as (worker,),
    ):
        worker.expect("joined")
        first.send_signal(signal.SIGKILL)
        first.wait()
        worker.go()
        worker.expect("ready")
        with coordinator_process(address, tmp_path / "another.db"):
            told = [worker.expect("error")]
            while (event := worker.expect_any())["event"] == "error":
                told.append(event)
            assert worker.wait() == 0
            return told


def test_a_waiting_call_raises_session_closed_when_state_is_lost(tmp_path: Path) -> None:
    code = """
    session = paceline.join()
    emit("joined")
    wait_for_go()
    barriers = session._connection.barriers
    wait = barriers.wait
    barriers.wait = lambda *arguments: (emit("ready"), wait(*arguments))
    try:
        session.barrier("b", timeout=20.0)
    except paceline.PacelineError as error:
        emit_error(error)
    session.leave()
    emit("left")
    """
    (error,) = _told_of_lost_state(tmp_path, code)
    assert error["type"] == "SessionClosed"
    assert "state" in str(error["text"])


def test_later_calls_raise_session_closed_when_state_is_lost(tmp_path: Path) -> None:
    code = """
    import threading

    session = paceline.join()
    emit("joined")
    wait_for_go()
    ended = threading.Event()
    session._connection.mesh.fault.on_failure(ended.set)
    emit("ready")
    assert ended.wait(20.0)
    for call in (
        lambda: session.barrier("b", timeout=20.0),
        lambda: session.group.all_reduce(np.ones(10)),
        lambda: session.store.set("key", b"value"),
    ):
        try:
            call()
        except paceline.PacelineError as error:
            emit_error(error)
    session.leave()
    emit("left")
    """
    told = _told_of_lost_state(tmp_path, code)
    assert [error["type"] for error in told] == ["SessionClosed"] * 3
    assert ["state" in str(error["text"]) for error in told[:2]] == [True, True]
