"""Stacks by a signal: who is signalled, and above all who is not, because the signal would kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline._session import stack_file
from paceline._session.stack_file import own_stacks, stacks_by_signal
from support.processes import Worker, workers

KEEPS = """
from paceline._session import stack_file
stack_file.keep_stack_file()
emit("kept", trouble=stack_file.trouble_here())
"""

STAYS = KEEPS + "wait_for_go()\n"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stacks, of this test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(stack_file.tempfile, "tempdir", None)
    folder = tmp_path / f"paceline-{os.geteuid()}" / "stacks"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    return folder


def file_for(folder: Path, pid: int, number: int) -> Path:
    path = folder / f"{os.stat('/proc/self/ns/pid').st_ino}.{pid}.{number}"
    path.touch(mode=0o600)
    return path


def test_a_process_with_a_stack_file_writes_its_stacks_on_a_signal(own_folder: Path) -> None:
    with workers(1, STAYS) as (worker,):
        assert worker.expect("kept")["trouble"] == ""
        (path,) = own_folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        for _ in range(2):
            text = stacks_by_signal(worker.process.pid)
            assert text.count("(most recent call first)") == 1, "each time from the start of the file"
        worker.go()
        assert worker.wait() == 0


def test_a_process_that_does_not_hold_the_lock_is_not_signaled(own_folder: Path) -> None:
    """A file of a process that was killed, whose pid another process has now. Planted: without the check it dies."""
    with workers(1, "emit('innocent')\nwait_for_go()") as (innocent,):
        innocent.expect("innocent")
        file_for(own_folder, innocent.process.pid, signal.SIGRTMIN + 9)
        with pytest.raises(ProcessLookupError, match="the process has ended"):
            stacks_by_signal(innocent.process.pid)
        innocent.go()
        assert innocent.wait() == 0


def test_a_lock_holder_without_a_handler_is_not_signaled(own_folder: Path) -> None:
    code = """
    import fcntl, glob
    emit("there")
    wait_for_go()
    held = open(glob.glob(os.environ["TMPDIR"] + "/paceline-*/stacks/*")[0], "r+")
    fcntl.lockf(held, fcntl.LOCK_EX)
    emit("holds")
    wait_for_go()
    """
    with workers(1, code) as (worker,):
        worker.expect("there")
        file_for(own_folder, worker.process.pid, signal.SIGRTMIN + 9)
        worker.go()
        worker.expect("holds")
        with pytest.raises(OSError, match="does not handle signal"):
            stacks_by_signal(worker.process.pid)
        worker.go()
        assert worker.wait() == 0


def test_a_signal_after_the_handler_is_unregistered_is_ignored() -> None:
    """As between the interpreter's end and the process's. Planted: without SIG_IGN before it, the signal kills."""
    code = (
        KEEPS
        + """
import faulthandler
number = signal.SIGRTMIN + 9
faulthandler.unregister(number)
os.kill(os.getpid(), number)
emit("lives")
"""
    )
    with workers(1, code) as (worker,):
        worker.expect("kept")
        worker.expect("lives")
        assert worker.wait() == 0


def test_a_forked_child_does_not_hold_or_release_the_lock() -> None:
    code = (
        KEEPS
        + """
child = os.fork()
if child == 0:
    signal.alarm(20)  # it must not outlive a test that fails
    emit("child", pid=os.getpid())
    wait_for_go()
    stack_file.keep_stack_file()
    emit("child kept", trouble=stack_file.trouble_here())
    wait_for_go()
    os._exit(0)
os.waitpid(child, 0)
emit("parent")
wait_for_go()
"""
    )
    with workers(1, code) as (worker,):
        worker.expect("kept")
        pid = worker.expect("child")["pid"]
        with pytest.raises(FileNotFoundError):
            stacks_by_signal(pid)
        worker.go()
        assert worker.expect("child kept")["trouble"] == "", "it takes its parent's handler over"
        for each in (pid, worker.process.pid):
            assert "in <module>" in stacks_by_signal(each)
        worker.go()
        worker.expect("parent")
        assert "in <module>" in stacks_by_signal(worker.process.pid)
        worker.go()
        assert worker.wait() == 0


def test_stack_files_of_dead_processes_are_removed(own_folder: Path) -> None:
    with workers(2, STAYS) as (first, second):
        first.expect("kept")
        second.expect("kept")
        first.signal(signal.SIGKILL)
        first.wait()
        with workers(1, STAYS) as (third,):
            third.expect("kept")
            pids = {int(path.name.split(".")[1]) for path in own_folder.iterdir()}
            assert pids == {second.process.pid, third.process.pid}
            release([second, third])


def release(started: list[Worker]) -> None:
    for worker in started:
        worker.go()
        assert worker.wait() == 0


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("signal.signal(signal.SIGRTMIN + 9, lambda *_: None)", "other code handles signal"),
        ("import faulthandler; faulthandler.register(signal.SIGRTMIN + 9)", "other code handles signal"),
        ("os.environ['TMPDIR'] = '/proc'; import tempfile; tempfile.tempdir = '/proc'", "No such file"),
    ],
)
def test_trouble_here_tells_why_there_is_no_stack_file(before: str, words: str) -> None:
    with workers(1, before + "\n" + KEEPS) as (worker,):
        assert words in worker.expect("kept")["trouble"]
        assert worker.wait() == 0


def test_keep_stack_file_outside_the_main_thread_gives_a_reason() -> None:
    code = """
    from paceline._session import stack_file
    thread = threading.Thread(target=stack_file.keep_stack_file)
    thread.start()
    thread.join()
    emit("kept", trouble=stack_file.trouble_here())
    """
    with workers(1, code) as (worker,):
        assert "outside the main thread" in worker.expect("kept")["trouble"]


def test_own_stacks_need_no_file() -> None:
    assert "in test_own_stacks_need_no_file" in own_stacks()


def test_stacks_by_signal_refuses_the_calling_process() -> None:
    with pytest.raises(OSError, match="it answers"):
        stacks_by_signal(os.getpid())
