"""`paceline run --spares`: a process with the script's imports done takes the place of a worker that fails.

The scripts never join, so no coordinator is needed; the address leads nowhere.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from e2e.spares import Job, pids

from support.command import command, wait_until_gone
from support.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

RUN = ("run", "--coordinator", "127.0.0.1:1", "--restarts", "5")

WAITING = """
    import os, signal
    import installed
    print("here", os.getpid())
    signal.pause()
"""

TELLING = """
    import json, os, pickle, signal, sys
    import beside
    import installed
    def function(): ...
    OF_EACH_PROCESS = {"PACELINE_LAUNCHER_FD", "PACELINE_OUTPUT_FD", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    told = {
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "pickled": pickle.loads(pickle.dumps(function)) is function,
        "environment": {name: value for name, value in os.environ.items() if name not in OF_EACH_PROCESS},
        "launcher": os.fstat(int(os.environ["PACELINE_LAUNCHER_FD"])).st_mode,
        "stdin": sys.stdin.read(),
        "cores": sorted(os.sched_getaffinity(0)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "session": os.getsid(0) == os.getpid(),
        "beside": os.listdir(os.environ["BESIDE"]).count(str(os.getpid())),
    }
    print("told", json.dumps(told))
    print("here", os.getpid())
    signal.pause()
"""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("module", [False, True])
def test_a_spare_replaces_a_killed_worker(tmp_path: Path, module: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, TELLING)
    monkeypatch.chdir(tmp_path)
    what = ("-m", "script") if module else (str(job.script),)
    with command(*RUN, "-n", "2", *what, "--lr", "1", **job.environment) as run:
        run.wait_for("here ", 2)
        workers = set(pids(run))
        for number in range(2):  # each time by a process that was there before the kill
            spare = job.spare(workers)
            assert spare not in job.ran_beside, "the user's own module ran before its time"
            kill(pids(run)[number])
            run.wait_for("here ", 3 + number)
            workers.add(spare)
            assert pids(run)[-1] == spare
    lines: dict[str, list[Any]] = {"[#0]": [], "[#1]": []}
    for prefix, text in re.findall(r"^(\[#\d\]) told (.*)$", run.stdout, re.MULTILINE):
        lines[prefix].append(json.loads(text))
    for first, second in lines.values():
        assert "PACELINE_LAUNCH" not in second["environment"], "the job would wait for the others again"
        del first["environment"]["PACELINE_LAUNCH"]
        assert second == first
        assert first["main"]
        assert first["pickled"]
        assert first["argv"][1:] == ["--lr", "1"]
        assert first["path"][0] == str(tmp_path)


def test_no_spare_is_started_with_spares_0(tmp_path: Path) -> None:
    job = Job(tmp_path, WAITING)
    with command(*RUN, "--spares", "0", str(job.script), **job.environment) as run:
        for number in range(2):
            run.wait_for("here ", 1 + number)
            assert job.imported == set(pids(run))
            kill(pids(run)[-1])
        run.wait_for("here ", 3)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_spares_end_when_their_launcher_ends(tmp_path: Path, signum: signal.Signals) -> None:
    job = Job(tmp_path, WAITING)
    with command(*RUN, "-n", "2", "--spares", "2", str(job.script), **job.environment) as run:
        run.wait_for("here ", 2)
        wait_for(lambda: len(job.imported) == 4)
        run.signal(signum)
        assert run.wait() == (-signum if signum == signal.SIGKILL else 128 + signum)
    wait_until_gone(list(job.imported))
    assert run.complaints == ("" if signum == signal.SIGKILL else "paceline: stopping 2 workers\n")


def test_a_finished_job_leaves_no_spare(tmp_path: Path) -> None:
    job = Job(tmp_path, "import installed, time, os\nwhile len(os.listdir(os.environ['MARKS'])) < 2: time.sleep(0.01)")
    with command(*RUN, str(job.script), **job.environment) as run:
        assert run.wait() == 0, str(run)
    assert run.complaints == ""
    assert len(job.imported) == 2
    wait_until_gone(list(job.imported))


def test_a_dead_spare_is_replaced_silently(tmp_path: Path) -> None:
    job = Job(tmp_path, WAITING)
    with command(*RUN, str(job.script), **job.environment) as run:
        run.wait_for("here ")
        first = job.spare(set(pids(run)))
        kill(first)
        second = job.spare({first, *pids(run)})
        assert run.complaints == ""
        kill(pids(run)[0])
        run.wait_for("here ", 2)
        assert pids(run)[1] == second


def test_repeatedly_dying_spares_are_replaced_with_growing_pauses(tmp_path: Path) -> None:
    dying = """
        if not first:
            os.makedirs(f"{folder}/{os.getpid()}")
            os.kill(os.getpid(), 9)
    """
    job = Job(tmp_path, WAITING, package=dying)
    with command(*RUN, str(job.script), **job.environment) as run:
        run.wait_for("here ")
        wait_for(lambda: len(job.imported) == 4)
        times = sorted((tmp_path / "marks" / str(pid)).stat().st_mtime for pid in job.imported - set(pids(run)))
        assert times[1] - times[0] > 0.9  # a pause of 1 s, but for the file system's clock
        assert times[2] - times[1] > 1.9
        assert run.complaints == ""


def test_an_import_error_in_a_spare_is_raised_again_in_the_script(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        WAITING,
        package="""
        if not first:
            os.makedirs(f"{folder}/{os.getpid()}", exist_ok=True)
            import sys
            before, os.environ["LEFT"], sys.left = ("LEFT" in os.environ, hasattr(sys, "left")), "", True
            raise RuntimeError(f"not here; left over: {before}")
        """,
    )
    with command(*RUN[:-1], "1", str(job.script), **job.environment) as run:
        run.wait_for("here ")
        spare = job.spare(set(pids(run)))
        kill(pids(run)[0])
        assert run.wait() == 1
    traceback = [line for line in run.stderr.splitlines() if line.startswith("[#0]")]
    assert traceback[0] == "[#0] Traceback (most recent call last):"
    assert traceback[1] == f'[#0]   File "{job.script}", line 3, in <module>'
    assert traceback[-1] == "[#0] RuntimeError: not here; left over: (False, False)"
    assert run.stderr.count("Traceback") == 1
    last = f"paceline: worker #0 (pid {spare}) ended with exit code 1; its only restart is used up"
    assert run.stderr.splitlines()[-1] == last


def test_a_spare_that_is_still_importing_replaces_a_worker(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        WAITING,
        package="""
        import time
        os.makedirs(f"{folder}/{os.getpid()}", exist_ok=True)
        while not first and not os.path.exists(f"{folder}-go"):
            time.sleep(0.01)
        os.rmdir(f"{folder}/{os.getpid()}")
        """,
    )
    with command(*RUN, str(job.script), **job.environment) as run:
        run.wait_for("here ")
        spare = job.spare(set(pids(run)))
        kill(pids(run)[0])
        run.wait_for("as a new worker")
        (tmp_path / "marks-go").touch()
        run.wait_for("here ", 2)
        assert pids(run)[1] == spare


def test_a_spare_runs_the_current_version_of_the_script(tmp_path: Path) -> None:
    job = Job(tmp_path, WAITING)
    with command(*RUN, str(job.script), **job.environment) as run:
        run.wait_for("here ")
        spare = job.spare(set(pids(run)))
        job.script.write_text(textwrap.dedent(WAITING).replace("import os", "print('new')\nimport os"))
        kill(pids(run)[0])
        run.wait_for("here ", 2)
        assert pids(run)[1] == spare
    assert run.stdout.splitlines()[1] == "[#0] new"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--spares", "1"), "give --restarts too"),
        (("--restarts", "1", "--spares", "-1"), "must be 0 or more"),
        (("--restarts", "1", "--spares", "1", "--no-python"), "does not go with --no-python"),
    ],
)
def test_invalid_spares_options_are_refused(arguments: tuple[str, ...], words: str) -> None:
    with command("run", *arguments, sys.executable) as run:
        assert run.wait() == 2, str(run)
    assert words in run.stderr
