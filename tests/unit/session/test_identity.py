"""What a launcher says of a process is what the process says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from paceline._session import identity
from paceline._session.identity import JoinRequest, is_gone, process_identity
from paceline_protocol import OURS
from pacelinepb.v1.session_pb2 import ProcessIdentity

CODE = """
import sys
from paceline._session.identity import process_identity
print(process_identity().SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


def test_launcher_and_worker_give_the_same_process_identity() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii"
    )
    with worker:
        assert worker.stdout is not None
        own = ProcessIdentity.FromString(bytes.fromhex(worker.stdout.readline()))
        assert process_identity(worker.pid) == own
        assert own.pid_namespace
        assert own.start_ticks
        assert not is_gone(own)
    assert is_gone(own)


def test_a_zombie_process_is_gone() -> None:
    with _ended() as child:
        assert (identity._stat(child.pid) or {})[identity._STATE] == "Z"
        assert process_identity(child.pid) == child, "its entry is still there"
        assert is_gone(child)


THREAD_OUTLIVES_MAIN = """
import ctypes, os, sys, threading

def goes_on():
    main = f"/proc/self/task/{os.getpid()}/stat"
    while open(main).read().rpartition(")")[2].split()[0] != "Z":
        pass
    print("on my own", flush=True)
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=goes_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_is_not_gone_while_one_of_its_threads_runs() -> None:
    """It has the state of a zombie as soon as its first thread has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", THREAD_OUTLIVES_MAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii"
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "on my own\n"
        own = process_identity(worker.pid)
        assert (identity._stat(worker.pid) or {})[identity._STATE] == "Z"
        assert not is_gone(own)
    assert is_gone(own)


@pytest.mark.parametrize(
    ("states", "over"), [(["Z 0", "D 4"], True), (["Z 0", "D 0"], False), (["D 4", "X 0"], True), ([], True)]
)
def test_a_process_is_over_when_each_of_its_threads_is_dead_or_exits(
    states: list[str], over: bool, tmp_path: Path
) -> None:
    """A killed process that uses a GPU may take seconds until its driver lets it go."""
    for thread, state in enumerate(states):
        letter, flags = state.split()
        (tmp_path / str(thread)).mkdir()
        (tmp_path / str(thread) / "stat").write_text(f"7 (python) {letter} 1 1 1 1 1 {flags} 1 1")
    assert identity._all_over(tmp_path) is over


def test_a_reused_pid_counts_as_another_process() -> None:
    assert is_gone(_other(start_ticks=process_identity().start_ticks - 1))


@pytest.mark.parametrize(
    "detail", [{"boot_id": "another boot"}, {"pid_namespace": 7}, {"start_ticks": 0}], ids=lambda detail: str(*detail)
)
def test_a_process_on_another_host_or_namespace_is_not_gone(detail: dict[str, object]) -> None:
    """On another host, or in another pid namespace, that pid is another process, or none."""
    with _ended() as child:
        os.waitpid(child.pid, 0)
        assert is_gone(child)
        elsewhere = ProcessIdentity()
        elsewhere.CopyFrom(child)
        for name, value in detail.items():
            setattr(elsewhere, name, value)
        assert not is_gone(elsewhere)


def test_a_process_whose_entry_cannot_be_read_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide other users' processes; and whoever has no file left cannot open anything there."""
    own = process_identity()
    monkeypatch.setattr(identity, "_stat", lambda _: None)
    assert not is_gone(own)
    assert is_gone(_other(pid=(1 << 32) - 1, start_ticks=1)), "there is no such pid"


def _other(**details: int) -> ProcessIdentity:
    """This process, but for these details."""
    own = process_identity()
    for name, value in details.items():
        setattr(own, name, value)
    return own


@contextmanager
def _ended() -> Iterator[ProcessIdentity]:
    """A child that has ended, which its parent reaps afterwards at the latest."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        yield process_identity(pid)
    finally:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def test_a_registration_carries_the_oldest_and_newest_version() -> None:
    """Without the newest it is a worker of the last release to the coordinator, and no generation speaks more."""
    request = JoinRequest("job", 1, 2, None).register("127.0.0.1:1", 3.0)
    assert (request.protocol_version, request.newest_protocol_version) == (OURS.oldest, OURS.newest)
