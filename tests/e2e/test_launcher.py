"""`paceline run` with scripts that never join: how workers are started, heard, stopped and answered for.

No coordinator is needed for that; the address leads nowhere.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from e2e.terminal import terminal

from paceline.cli.launcher.worker import Worker
from support.command import NOT_JOINED, Command, command, wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl")

NOWHERE = ("--coordinator", "127.0.0.1:1")

WAITING = """
    import os, signal, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("pids", os.getpid(), child.pid)
    signal.pause()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def write(script: Path, code: str) -> str:
    script.write_text(textwrap.dedent(code))
    return str(script)


def pids(run: Command) -> list[int]:
    return [int(pid) for pair in re.findall(r"pids (\d+) (\d+)", run.stdout) for pid in pair]


def test_a_worker_is_bound_to_its_cores_before_it_runs(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher goes on only when the worker has told which cores it has."""

    class Late(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            select.select([self.stdout], [], [])

    monkeypatch.setattr(subprocess, "Popen", Late)
    code = write(script, "import os, signal; os.write(1, b'%a\\n' % sorted(os.sched_getaffinity(0))); signal.pause()")
    before = os.sched_getaffinity(0)
    one = {max(before)}
    worker = Worker(0, [code], lambda news: dict(os.environ), one)
    try:
        assert [line.text for line in worker.read("stdout")] == [str(sorted(one)).encode()]
        assert os.sched_getaffinity(0) == before, "the launcher has its own cores again"
    finally:
        worker.dismiss()


def test_a_script_gets_its_arguments_and_environment_and_line_prefixes(script: Path) -> None:
    code = write(
        script,
        """
        import os, sys, helper
        names = ("COORDINATOR", "JOB", "MIN_WORKERS", "MAX_WORKERS")
        print(__name__, sys.argv[1:], *(os.environ["PACELINE_" + name] for name in names), helper.WORD)
        print("to stderr", file=sys.stderr)
        sys.stdout.write("no end")
        """,
    )
    (script.parent / "helper.py").write_text("WORD = 'beside the script'")
    with command("run", "-n", "2", "--min", "4", "--job", "j", *NOWHERE, code, "--lr", "-n", "3") as run:
        assert run.wait() == 0
    line = "__main__ ['--lr', '-n', '3'] 127.0.0.1:1 j 4 4 beside the script"
    assert sorted(run.stdout.splitlines()) == [f"[#0] {line}", "[#0] no end", f"[#1] {line}", "[#1] no end"]
    assert sorted(run.complaints.splitlines()) == ["[#0] to stderr", "[#1] to stderr"]


WORLD = """
    import os
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    print(*(os.environ.get(name, "none") for name in names), "MASTER_PORT" in os.environ)
"""


def test_workers_of_a_fixed_number_find_a_world_of_torch(script: Path) -> None:
    with command("run", "-n", "2", write(script, WORLD)) as run:
        assert run.wait() == 0
    assert sorted(run.stdout.splitlines()) == ["[#0] 0 2 0 2 127.0.0.1 True", "[#1] 1 2 1 2 127.0.0.1 True"]


@pytest.mark.parametrize(
    "options",
    [("--min", "1"), ("--restarts", "1"), NOWHERE],
    ids=["elastic", "restarts", "other-launchers"],
)
def test_workers_that_may_come_and_go_find_no_world_of_torch(script: Path, options: tuple[str, ...]) -> None:
    with command("run", "-n", "2", *options, write(script, WORLD)) as run:
        assert run.wait() == 0
    assert set(run.stdout.splitlines()) == {f"[#{n}] none none none none none False" for n in (0, 1)}


@pytest.mark.parametrize("code", ["pass", "raise SystemExit"])
def test_workers_that_never_join_get_one_warning(script: Path, code: str) -> None:
    with command("run", "-n", "2", write(script, code)) as run:
        assert run.wait() == 0
    assert run.stderr == (
        f"{NOT_JOINED} or torch.distributed.init_process_group(): each of the 2 ran the whole script by itself\n"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import paceline; paceline.join().__enter__()",
        "raise SystemExit(3)",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'])",  # which may have joined
    ],
)
def test_workers_that_join_or_fail_get_no_warning(script: Path, code: str) -> None:
    with command("run", "-n", "2", write(script, code)) as run:
        run.wait()
    assert NOT_JOINED not in run.stderr


def test_a_single_worker_that_never_joins_gets_no_warning(script: Path) -> None:
    with command("run", "-n", "1", write(script, "pass")) as run:
        assert run.wait() == 0
    assert run.complaints == ""


@pytest.mark.slow
def test_a_module_is_run_with_its_arguments(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(script, "import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(script.parent)
    with command("run", "-n", "1", *NOWHERE, "-m", "script", "one") as run:
        assert run.wait() == 0
    assert run.stdout == "[#0] __main__ ['one']\n"


@pytest.mark.slow
def test_no_output_line_is_lost_or_torn(script: Path) -> None:
    code = write(
        script,
        """
        import os, sys
        sys.stdout.buffer.write(b"".join(b"%d %s\\n" % (n, b"x" * (n % 500)) for n in range(20_000)))
        sys.stdout.buffer.write(b"bad \\xff byte\\n")
        """,
    )
    with command("run", "-n", "2", *NOWHERE, code) as run:
        assert run.wait() == 0
    expected = [f"{n} {'x' * (n % 500)}" for n in range(20_000)] + ["bad \N{REPLACEMENT CHARACTER} byte"]
    for index in range(2):
        prefix = f"[#{index}] "
        assert [line[len(prefix) :] for line in run.stdout.splitlines() if line.startswith(prefix)] == expected


def test_a_progress_bar_without_a_line_end_is_shown_on_a_terminal(script: Path) -> None:
    code = write(
        script,
        """
        import signal, sys
        sys.stderr.write("\\r 10%|#")
        sys.stderr.flush()
        sys.stderr.write("\\r 50%|#####")
        sys.stderr.flush()
        signal.pause()
        """,
    )
    with terminal("run", "-n", "2", *NOWHERE, code) as shown:
        for rank in (0, 1):
            shown.wait_for(f"[#{rank}]  50%|#####")
        shown.press("\x03")
        assert shown.wait() == 130
    assert "Traceback" not in shown.text


@pytest.mark.slow
def test_log_files_keep_every_line(script: Path, tmp_path: Path) -> None:
    code = write(script, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    with command("run", "-n", "2", "--log-dir", str(tmp_path / "logs"), *NOWHERE, code) as run:
        assert run.wait() == 3
    for index in range(2):
        lines = (tmp_path / "logs" / f"worker-{index}.log").read_text().splitlines()
        assert lines[0].startswith("# pid ")
        assert set(lines[1:3]) == {"out", "err"}
        assert lines[3].startswith(f"# worker #{index} (pid ")
        assert lines[3].endswith("ended with exit code 3")


def test_a_scripts_own_error_keeps_its_traceback_without_launcher_frames(script: Path) -> None:
    code = write(script, "def f():\n    raise ValueError('mine')\nf()\n")
    with command("run", "-n", "1", *NOWHERE, code) as run:
        assert run.wait() == 1
    lines = run.stderr.splitlines()
    assert lines[0] == "[#0] Traceback (most recent call last):"
    assert lines[1] == f'[#0]   File "{script}", line 3, in <module>'
    assert "[#0] ValueError: mine" in lines
    assert re.fullmatch(r"paceline: worker #0 \(pid \d+\) ended with exit code 1", lines[-1])
    assert "runpy" not in run.stderr
    assert "shim.py" not in run.stderr


def test_a_paceline_error_shows_its_message_and_the_script_line(script: Path) -> None:
    code = write(
        script,
        """
        from paceline import PeerLost
        def train():
            raise PeerLost('rank 2 (h, pid 5) was killed by SIGKILL', ranks=(2,), operation=7, generation=3)
        train()
        """,
    )
    with command("run", "-n", "1", *NOWHERE, code) as run:
        assert run.wait() == 1
    assert run.stderr.splitlines()[:4] == [
        "[#0] paceline: rank 2 (h, pid 5) was killed by SIGKILL",
        f'[#0]   File "{script}", line 4, in train',
        "[#0]     raise PeerLost('rank 2 (h, pid 5) was killed by SIGKILL', ranks=(2,), operation=7, generation=3)",
        "[#0]   PeerLost in operation 7 of generation 3; PACELINE_TRACEBACK=1 shows the whole stack",
    ]
    assert "Traceback" not in run.stderr
    with command("run", "-n", "1", *NOWHERE, code, PACELINE_TRACEBACK="1") as run:
        assert run.wait() == 1
    assert "Traceback" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("os.abort()", 134)]
)
def test_the_launcher_exits_with_the_failed_workers_exit_code(script: Path, ending: str, code: int) -> None:
    path = write(script, f"import os, signal, sys\n{ending}\n")
    with command("run", "-n", "1", *NOWHERE, path) as run:
        assert run.wait() == code


@pytest.mark.slow
def test_workers_still_running_after_a_failure_are_stopped(script: Path) -> None:
    path = write(
        script,
        """
        import os, signal, sys
        try:
            os.mkdir(sys.argv[1])  # the one that succeeds is the one that fails
        except FileExistsError:
            signal.pause()
        sys.exit(9)
        """,
    )
    arguments = (path, str(script.parent / "first"))
    # The grace is failure_timeout + 5 s: as short as it can be here.
    with command("run", "-n", "2", *NOWHERE, *arguments, PACELINE_FAILURE_TIMEOUT="0.01") as run:
        assert run.wait() == 9
    assert "ended with exit code 9" in run.stderr
    assert "paceline: stopping worker #" in run.stderr


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_workers(script: Path, signum: signal.Signals, code: int) -> None:
    path = write(script, WAITING)
    with command("run", "-n", "4", *NOWHERE, path) as run:
        run.wait_for("pids", 4)
        run.signal(signum)
        assert run.wait() == code
    assert run.complaints == "paceline: stopping 4 workers\n"
    wait_until_gone(pids(run))


@pytest.mark.slow
def test_a_second_signal_kills_workers_that_ignore_the_first(script: Path) -> None:
    path = write(script, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + textwrap.dedent(WAITING))
    with command("run", "-n", "2", "--min", "1", *NOWHERE, path) as run:
        run.wait_for("pids", 2)
        run.signal(signal.SIGINT)
        run.wait_for("stopping 2 workers")
        run.signal(signal.SIGINT)
        assert run.wait(timeout=20.0) == 130  # it would kill those of an elastic job by itself, but after 30 s
    assert run.complaints == "paceline: stopping 2 workers\npaceline: killing 2 workers\n"
    wait_until_gone(pids(run))


def test_killing_the_launcher_ends_its_workers(script: Path) -> None:
    path = write(script, "import os, signal\nprint('pids', os.getpid(), os.getpid())\nsignal.pause()\n")
    with command("run", "-n", "4", *NOWHERE, path) as run:
        run.wait_for("pids", 4)
        run.signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    wait_until_gone(pids(run))


@pytest.mark.slow
def test_killing_a_starting_launcher_leaves_no_worker(script: Path) -> None:
    path = write(script, "import os, signal\nprint('pids', os.getpid(), os.getpid(), flush=True)\nsignal.pause()\n")
    with command("run", "-n", "8", *NOWHERE, path) as run:
        run.wait_for("pids", 1)  # the others are anywhere between fork and script
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        run.signal(signal.SIGKILL)
        run.wait()
    wait_until_gone([int(pid) for pid in children])


@pytest.mark.slow
def test_a_paused_reader_does_not_block_a_worker(script: Path) -> None:
    path = write(
        script,
        """
        import sys
        for n in range(3000):
            sys.stdout.write("y" * 1000 + "\\n")
        open(sys.argv[1], "w").close()
        """,
    )
    done = script.parent / "done"
    arguments = ["run", "-n", "1", *NOWHERE, path, str(done)]
    # 3 MB are far more than pipes hold, and nobody reads the launcher's output.
    process = subprocess.Popen([sys.executable, "-m", "paceline", *arguments], stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while not done.exists():
            assert time.monotonic() < deadline, "the worker waits for the terminal"
            time.sleep(0.01)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert out.count(b"\n") == 3000
    finally:
        process.kill()
        process.communicate()


def test_no_python_runs_another_program(script: Path) -> None:
    write(script, '#!/bin/sh\necho "number $PACELINE_LOCAL_RANK: $1"\nexit 3\n')
    script.chmod(0o755)
    with command("run", *NOWHERE, "--no-python", str(script), "one two") as run:
        assert run.wait() == 3, str(run)
    assert run.stdout == "[#0] number 0: one two\n"


def test_redirected_lines_go_only_to_log_files(script: Path, tmp_path: Path) -> None:
    code = write(script, "import sys; print('out'); print('err', file=sys.stderr)")
    with command("run", "-n", "2", *NOWHERE, "--log-dir", str(tmp_path / "logs"), "-r", "3", "-t", "1:1", code) as run:
        assert run.wait() == 0, str(run)
    assert (run.stdout, run.complaints) == ("[#1] out\n", "")
    for index in range(2):
        assert {"out", "err"} <= set((tmp_path / "logs" / f"worker-{index}.log").read_text().splitlines())
    with command("run", "-n", "1", *NOWHERE, "--tee", "3", code, TMPDIR=str(tmp_path)) as run:
        assert run.wait() == 0, str(run)
    found = re.match(r"paceline: the lines of the workers are kept in (\S+)", run.stderr)
    assert found is not None
    assert "out" in (Path(found[1]) / "worker-0.log").read_text()


def test_a_worker_that_is_stopped_while_all_others_have_ended_is_named(script: Path) -> None:
    code = """
        import os, signal
        if os.environ["PACELINE_LOCAL_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    with command("run", *NOWHERE, "-n", "3", write(script, code)) as run:
        run.wait_for("waiting for")
        found = re.search(r"all other workers have ended; waiting for worker #1 \(pid (\d+), stopped by", run.stderr)
        assert found is not None, str(run)
        os.kill(int(found[1]), signal.SIGCONT)
        assert run.wait() == 0, str(run)
