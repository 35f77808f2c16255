"""`paceline run` when a worker hangs or is frozen: it is said, and the worker is replaced if it does not come back."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.launcher import Launcher, Terms, WorkerSettings, left_behind
from paceline.cli.launcher import launcher as launcher_module
from paceline.cli.launcher.console import Console
from paceline.testing import coordinator

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
    pytest.mark.alone,
]

TRAINS = """
    import os, signal, sys, time
    import numpy as np
    import paceline

    folder = sys.argv[1]

    def there(mark):
        return os.path.exists(f"{folder}/{mark}")

    with paceline.join() as session:
        value = {"sum": np.zeros(1)}
        for step in session.steps(paceline.TrainState(value=value), total=10**6):
            with step:
                if step.number == 3 and session.rank == 1 and not there("hung"):
                    open(f"{folder}/hung", "w").write(str(os.getpid()))
                    HANG
                value["sum"] = value["sum"] + session.group.all_reduce(np.ones(1))
                time.sleep(0.01)
            if step.number > 3 and there("stop"):
                session.stop()
    os.write(1, b"ended as rank %d of %d\\n" % (session.rank, session.size))
"""

HANGS = "time.sleep(1e6)"
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"


class Run:
    """A launcher on this thread, and what is said on it; `on` names what to do once a sentence is said."""

    def __init__(self, folder: Path, hang: str, restarts: int) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(textwrap.dedent(TRAINS).replace("HANG", hang))
        self._command = (str(script), str(folder))
        self._terms = Terms(workers=3, minimum=1, elastic=True, restarts=restarts)
        self.on: dict[str, Callable[[], object]] = {}
        self.out, self.said = io.StringIO(), io.StringIO()

    def __call__(self) -> int:
        run = self

        class Said(io.StringIO):
            def write(self, text: str) -> int:
                for sentence in [each for each in run.on if each in text]:
                    threading.Thread(target=run.on.pop(sentence)).start()
                return super().write(text)

        self.said = Said()
        with coordinator() as address, contextlib.closing(Console(None, self.out, self.said)) as console:
            settings = WorkerSettings(address, "digits", 1, 3, at_once=3)
            return Launcher(self._command, self._terms, settings, console, grace=5.0, report_exit=lambda *_: None).run()

    def stop_training(self) -> None:
        (self.folder / "stop").touch()

    @property
    def hung(self) -> int:
        return int((self.folder / "hung").read_text())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_STEP_TIMEOUT", "3")
    for module in (left_behind, launcher_module):
        monkeypatch.setattr(module, "TELL_S", 2.0)
        monkeypatch.setattr(module, "HUNG_S", 12.0)


@pytest.mark.parametrize(
    ("hang", "how"), [(HANGS, "hangs, computes for long, or is frozen"), (STOPS, "is stopped by SIGSTOP")]
)
def test_a_worker_that_hangs_is_replaced(hang: str, how: str, tmp_path: Path) -> None:
    run = Run(tmp_path, hang, restarts=1)
    run.on["a new worker has joined"] = run.stop_training
    assert run() == 0, run.said.getvalue()
    said = run.said.getvalue()
    assert (
        f"the job goes on without the former rank 1 (pid {run.hung}), which {how}; it is killed unless it comes back "
        "within 10 s\n"
    ) in said
    assert (
        f"restarting the former rank 1 (pid {run.hung} was killed after the job had gone on without it for 12 s) as a "
        "new worker in 0.1 s (its only restart)\n"
    ) in said
    assert re.search(r"a new worker has joined as rank 2 \(pid \d+\)\n", said)
    assert sorted(re.findall(r"ended as rank \d of 3", run.out.getvalue())) == [
        f"ended as rank {rank} of 3" for rank in range(3)
    ], said


def test_a_worker_that_comes_back_in_time_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (left_behind, launcher_module):
        monkeypatch.setattr(module, "HUNG_S", 600.0)
    run = Run(tmp_path, STOPS, restarts=1)
    run.on["which is stopped by SIGSTOP"] = lambda: os.kill(run.hung, signal.SIGCONT)
    run.on["it rejoins with the state"] = run.stop_training
    assert run() == 0, run.said.getvalue()
    assert "restarting" not in run.said.getvalue()
    assert len(re.findall("ended as rank", run.out.getvalue())) >= 2


def test_a_worker_that_still_hangs_when_the_job_is_done_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, HANGS, restarts=0)
    run.on["or is frozen; it may come back"] = run.stop_training
    assert run() == 0, run.said.getvalue()
    said = run.said.getvalue()
    assert (
        f"the job is done without the former rank 1 (pid {run.hung}), which hangs, computes for long, or is frozen; "
        "it is killed unless it comes back within 10 s\n"
    ) in said
    assert f"the former rank 1 (pid {run.hung}) was killed after the job had gone on without it for 12 s\n" in said
    assert len(re.findall("ended as rank", run.out.getvalue())) == 2


def test_a_worker_that_has_failed_and_takes_long_to_end_does_not_hang(tmp_path: Path) -> None:
    late = "threading.Timer(12.0, os._exit, (7,)).start(); raise ValueError('mine')"
    run = Run(tmp_path, f"import threading; {late}", restarts=0)
    run.on["ended with exit code 7"] = run.stop_training
    assert run() == 0, run.said.getvalue()
    said = run.said.getvalue()
    assert "the job goes on without" not in said
    assert f"rank 1 (pid {run.hung}) ended with exit code 7; 2 of 3 workers are left\n" in said
