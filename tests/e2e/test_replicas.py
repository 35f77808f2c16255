"""`paceline run --replica-size` with scripts that need no torch: the world of each replica, and its end as a whole.

No coordinator is needed for that; the address leads nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline._session.launcher_pipe import LAUNCHER_FD
from paceline.cli.launcher import Launcher, Terms, WorkerSettings
from paceline.cli.launcher.console import Console
from paceline.cli.launcher.worker import NEWS, Worker
from paceline.launch._environment import torch_world
from support.command import Command, command, wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl")

NOWHERE = ("--coordinator", "127.0.0.1:1")

SAY = """
    import os, signal, sys, time
    world = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")]
    os.write(1, " ".join(["pid", str(os.getpid()), "world", *world, "\\n"]).encode())
    folder, number = sys.argv[1], int(os.environ["LOCAL_RANK"])
    def all_are_there(mark, count, counts=True):
        if counts:
            open(f"{folder}/{mark}-{number}", "w").close()
        while sum(name.startswith(f"{mark}-") for name in os.listdir(folder)) < count:
            time.sleep(0.01)
    def is_first(mark):
        try:
            os.mkdir(f"{folder}/{mark}")
        except FileExistsError:
            return False
        return True
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def write(folder: Path, code: str) -> tuple[str, str]:
    """Returns the script, and the folder as its argument."""
    script = folder.parent / "script.py"
    script.write_text(textwrap.dedent(SAY) + textwrap.dedent(code))
    return str(script), str(folder)


def worlds(run: Command) -> list[tuple[int, list[int]]]:
    """The pid, and RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT of each process, as they came."""
    found = re.findall(r"pid (\d+) world (\d+) (\d+) (\d+) (\d+) (\d+)", run.stdout)
    return [(int(pid), [int(number) for number in numbers]) for pid, *numbers in found]


def test_each_replica_has_a_world_with_a_port_of_its_own(folder: Path) -> None:
    code = """
        import socket
        with socket.socket() as listener:
            if os.environ["RANK"] == "0":  # as torch's store does
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("", int(os.environ["MASTER_PORT"])))
                listener.listen()
            all_are_there("here", 4)
            with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
                all_are_there("done", 4)
        bounds = (os.environ[f"PACELINE_{name}_WORKERS"] for name in ("MIN", "MAX"))
        print("bounds", *bounds, *(name for name in os.environ if "ELASTIC" in name))
    """
    logs = folder.parent / "logs"
    arguments = ("-n", "4", "--replica-size", "2", "--min", "1", "--log-dir", str(logs), *NOWHERE)
    with command("run", *arguments, *write(folder, code), TORCHELASTIC_USE_AGENT_STORE="True") as run:
        assert run.wait() == 0, str(run)
    said = sorted(world for _, world in worlds(run))
    assert [world[:4] for world in said] == [[0, 2, 0, 2], [0, 2, 2, 2], [1, 2, 1, 2], [1, 2, 3, 2]]
    ports = {world[2]: world[4] for world in said}
    assert ports[0] == ports[1] != ports[2] == ports[3]
    prefixes = sorted(line.split()[0] for line in run.stdout.splitlines() if line.endswith("bounds 1 2"))
    assert prefixes == ["[#0.0]", "[#0.1]", "[#1.0]", "[#1.1]"]
    assert run.complaints == ""
    last = (logs / "worker-3.log").read_text().splitlines()[-1]
    assert re.fullmatch(r"# rank 1 of replica #1 \(pid \d+\) ended with exit code 0", last)


def test_a_killed_rank_takes_its_replica_which_starts_again_with_a_new_port(folder: Path) -> None:
    """Its mates ignore SIGTERM, and would stay for ever, as in a collective of torch; the other replica stays."""
    code = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if number < 3 or not is_first(f"first-{number}"):
            all_are_there("again", 3, counts=number > 2)
            sys.exit(0)
        all_are_there("began", 3)
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            signal.pause()
    """
    with command("run", "-n", "6", "--replica-size", "3", "--restarts", "2", *NOWHERE, *write(folder, code)) as run:
        assert run.wait() == 0, str(run)
    said = worlds(run)
    before: dict[int, tuple[int, int]] = {}
    after: dict[int, tuple[int, int]] = {}
    for pid, (_, _, number, _, port) in said:
        (before if number not in before else after)[number] = (pid, port)
    assert (set(before), set(after)) == ({*range(6)}, {3, 4, 5}), "replica 0 was left alone"
    (old,), (new,) = ({port for _, port in group} for group in ([before[n] for n in (3, 4, 5)], after.values()))
    assert old != new
    assert run.complaints == (
        f"paceline: restarting replica #1 (rank 0, pid {before[3][0]} was killed by SIGKILL) "
        "as a whole in 0.1 s (1 of its 2 restarts)\n"
    )
    wait_until_gone([pid for pid, _ in said])


@pytest.mark.slow
def test_a_replica_fails_once_however_many_of_its_ranks_fail(folder: Path) -> None:
    code = """
        print("an error of rank", os.environ["RANK"], file=sys.stderr)
        all_are_there("told", 2)
        sys.exit(3 + number)
    """
    with command("run", "-n", "2", "--replica-size", "2", *NOWHERE, *write(folder, code)) as run:
        code_of_the_first = run.wait()
    assert code_of_the_first in (3, 4), str(run)
    *errors, last = run.stderr.splitlines()
    assert sorted(errors) == ["[#0.0] an error of rank 0", "[#0.1] an error of rank 1"]
    number = code_of_the_first - 3
    assert re.fullmatch(
        rf"paceline: rank {number} of replica #0 \(pid \d+\) ended with exit code {code_of_the_first}", last
    )


@pytest.mark.slow
def test_a_replica_that_cannot_be_restarted_any_more_is_lost_and_the_others_go_on(folder: Path) -> None:
    code = """
        if number > 1:
            if number == 2:
                sys.exit(9)
            while True:
                signal.pause()
        all_are_there("lost", 1, counts=False)
    """
    with command("run", "-n", "4", "--replica-size", "2", "--min", "1", *NOWHERE, *write(folder, code)) as run:
        run.wait_for("is left")
        (folder / "lost-2").touch()
        assert run.wait() == 0, str(run)
    lost, through = run.complaints.splitlines()
    assert re.fullmatch(
        r"paceline: rank 0 of replica #1 \(pid \d+\) ended with exit code 9; 1 of 2 replicas here is left", lost
    )
    assert re.fullmatch(
        r"paceline: the others finished the job without replica #1 \(rank 0, pid \d+ ended with exit code 9\)", through
    )
    wait_until_gone([pid for pid, _ in worlds(run)])


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_all_replicas_leave_on_a_signal(folder: Path, signum: signal.Signals, code: int) -> None:
    leaves = """
        def leave(*_):
            time.sleep(1.0 if number else 0.0)  # longer than the mates of a rank that has failed are given
            print("left in good order")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready")
        while True:
            signal.pause()
    """
    arguments = ("-n", "4", "--replica-size", "2", "--restarts", "3", *NOWHERE, *write(folder, leaves))
    with command("run", *arguments) as run:
        run.wait_for("ready", 4)
        run.signal(signum)
        assert run.wait() == code, str(run)
    assert run.stdout.count("left in good order") == 4
    assert run.complaints == "paceline: stopping 4 workers\n"


@pytest.mark.slow
def test_killing_the_launcher_ends_all_ranks_of_a_replica_that_is_about_to_end(folder: Path) -> None:
    code = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        all_are_there("here", 3)
        if number == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            sys.exit(1)
        while True:
            signal.pause()
    """
    with command("run", "-n", "3", "--replica-size", "3", "--restarts", "1", *NOWHERE, *write(folder, code)) as run:
        assert run.wait() == -signal.SIGKILL
    wait_until_gone([pid for pid, _ in worlds(run)])


@pytest.mark.parametrize(("error", "follows"), [("ReplicaLost", True), ("PeerLost", False)])
def test_a_rank_that_hears_of_a_lost_mate_does_not_count_as_the_one_that_failed(
    folder: Path, error: str, follows: bool
) -> None:
    """Its error names its own replica, as a member that was cut off itself would name its own rank."""
    code = """
        from paceline import errors
        from paceline._session.launcher_pipe import tell_launcher
        tell_launcher("view", {"pid": os.getpid(), "rank": 1, "world_size": 2, "generation": 1})
        raise getattr(errors, sys.argv[2])("rank 2 (h, pid 5) was killed by SIGKILL", ranks=(1,))
    """
    environment = dict(os.environ) | torch_world(7, 4, 3)
    arguments = [*write(folder, code), error]
    worker = Worker(7, arguments, lambda fd: environment | {LAUNCHER_FD: str(fd)}, replica_size=4)
    try:
        os.set_blocking(worker.streams[NEWS], True)
        while (lines := worker.read(NEWS)) is not None:
            for line in lines:
                worker.heard(line.text)
        while worker.reap() is None:
            pass
        end = worker.end()
    finally:
        worker.dismiss()
    assert (worker.label, str(worker)) == ("1.3", "rank 3 of replica 1")
    assert (end.label, end.position, end.slot, end.joined, end.follows) == ("replica 1", 3, 7, True, follows)


def test_a_rank_that_cannot_be_started_fails_its_replica_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mate would wait for it for ever. The one before it had ended with 0, which does not count for it."""
    code = """
        if is_first(f"first-{number}"):
            sys.exit(3 * number)
        all_are_there("again", 2)
    """
    started: list[int] = []

    class Scarce(Worker):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            started.append(args[0])
            if len(started) == 3:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("paceline.cli.launcher.launcher.Worker", Scarce)
    out, err = io.StringIO(), io.StringIO()
    terms = Terms(workers=1, elastic=True, restarts=2)
    settings = WorkerSettings("127.0.0.1:1", "digits", 1, 1)
    with contextlib.closing(Console(None, out, err)) as console:
        launcher = Launcher(
            write(folder, code), terms, settings, console, grace=1.0, report_exit=lambda *_: None, replica_size=2
        )
        assert launcher.run() == 0
    assert started == [0, 1, 0, 1, 0, 1]
    first, scarce, again, *_ = err.getvalue().splitlines()
    assert re.search(
        r"restarting replica #0 \(rank 1, pid \d+ ended with exit code 3\) as a whole .* \(1 of its 2 restarts\)", first
    )
    assert scarce == "paceline: cannot start a worker in place of rank 0 of replica #0: Cannot allocate memory"
    assert again.endswith("as a whole in 0.2 s (2 of its 2 restarts)")
