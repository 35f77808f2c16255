"""The flight recorder in a process of its own, asked by a signal while it waits, logs or ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from support.waiting import wait_for


def read(path: Path | None) -> dict[str, Any]:
    assert path is not None
    found: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    return found


_PRELUDE = """
import logging, os, queue, re, signal, sys, threading, time
from logging.handlers import QueueHandler
from pathlib import Path
from paceline._base.activity import FlightRecorder
from paceline._session.flight import FlightLog

recorder = FlightRecorder()
log = FlightLog(recorder, lambda: {"job": "x", "rank": 0}, Path(sys.argv[1]))
log.watch_signal()
"""


def run(code: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(code), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_waiting_process_dumps_on_a_signal(tmp_path: Path) -> None:
    """The main thread hangs in a condition, as it does in a collective; it goes on waiting afterwards.

    A signal in the instant before it sleeps would be Python's to handle when it wakes, so that has to be over.
    """
    code = """
    condition, released = threading.Condition(), []

    def look():
        text = open(f"/proc/self/task/{threading.main_thread().native_id}/status").read()
        return re.findall(r"State:\\t(.)", text), re.findall(r"switches:\\t(.+)", text)

    def control():
        with condition:  # free only once the main thread is about to wait
            before, now = None, look()
        while before != now or now[0] != ["S"]:  # it sleeps for good, and not for the interpreter's lock
            time.sleep(0.05)
            before, now = now, look()
        print("waiting", flush=True)
        sys.stdin.readline()
        with condition:
            released.append(True)
            condition.notify()

    with condition:
        recorder.issue("", 1, b"all_reduce op=sum float32[4]").begin()
        threading.Thread(target=control).start()
        condition.wait()
    for thread in threading.enumerate():
        if thread.name == "paceline-flight":
            thread.join()  # it says where the file is when that is there
    sys.exit(42 if released else 1)
    """
    with run(code, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGUSR2)
        path = tmp_path / f"x.rank0.pid{process.pid}.json"
        wait_for(path.exists)
        assert [entry["state"] for entry in read(path)["operations"]] == ["running"]
        assert process.poll() is None
        _, errors = process.communicate("go on\n", timeout=20)
        assert process.returncode == 42, errors
    assert str(path) in errors


def test_a_signal_while_locks_are_held_does_not_deadlock(tmp_path: Path) -> None:
    """The main thread holds what the dump needs, its log's queue and its own description, while the signal comes."""
    code = """
    records, describing = queue.Queue(), threading.Lock()
    logging.getLogger("paceline.flight").addHandler(QueueHandler(records))

    def describe():
        with describing:
            return {"job": "x", "rank": 0}

    log._describe = describe
    with records.mutex, describing:
        signal.raise_signal(signal.SIGUSR2)
        print("still here", flush=True)
    records.get(timeout=20)
    """
    with run(code, tmp_path) as process:
        output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "still here\n"), errors
    assert (tmp_path / f"x.rank0.pid{process.pid}.json").exists()


def test_a_forked_child_writes_no_dump(tmp_path: Path) -> None:
    code = """
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGUSR2)
        log.on_abort(ValueError())
        busy = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        os._exit(1 if log.dump("child") or busy else 43)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
    """
    with run(code, tmp_path) as process:
        output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "43\n"), errors
    assert list(tmp_path.iterdir()) == []
