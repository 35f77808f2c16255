"""`paceline.run` in a script, an interactive Python and a Jupyter kernel: workers die, raise and are interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.command import Command, script, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")]

TRAIN = """
import os, signal, sys, time
import numpy as np
import paceline
from paceline import nn

x = np.random.default_rng(0).standard_normal((96, 4)).astype(np.float32)
t = (x.sum(1) > 0).astype(np.int64)

def train(session, before=lambda step: None, total=40):
    model = paceline.DDP(nn.Linear(4, 2, rng=np.random.default_rng(1)), session.group)
    optimizer = paceline.optim.SGD(model, lr=0.1)
    sampler = paceline.ElasticSampler(len(x), 12)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(state, total=total):
        with step:
            if before(step):
                session.stop()
            loss, dy = nn.softmax_cross_entropy(model(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            model.backward(dy, step.weight)
            optimizer.step()
        if step.applied and session.rank == 0 and step.number % 10 == 0:
            print("step", step.number, "of", session.size)
    return float(nn.softmax_cross_entropy(model(x), t)[0])
"""


@contextmanager
def running(code: str, folder: Path, until: str = "") -> Iterator[Command]:
    """Runs a script, until it has printed a text."""
    path = folder / "cell.py"
    path.write_text(TRAIN + code)
    with script(path, TMPDIR=str(folder)) as process:
        process.wait_for(until)
        yield process


def run(code: str, folder: Path) -> Command:
    """Runs a script to its end."""
    with running(code, folder) as process:
        assert process.wait() == 0, str(process)
        return process


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def losses(text: str) -> dict[int, float]:
    return {int(rank): float(value) for rank, value in re.findall(r"(\d+): ([\d.e-]+)", text)}


def test_workers_return_what_one_process_computes(tmp_path: Path) -> None:
    done = run("print(paceline.run(train, n=1))\nprint(paceline.run(train, n=3))", tmp_path)
    one, three = (losses(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert set(three) == {0, 1, 2}
    assert three[0] == pytest.approx(one[0], rel=1e-5)
    assert done.stdout.count("[0] step 40 of 3") == 1
    assert done.complaints == ""


def test_the_others_finish_without_one_that_is_killed(tmp_path: Path) -> None:
    code = """
def die(step):
    if step.number >= 15 and step.world == 3 and step.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
alone = paceline.run(train, n=1)
used = time.process_time()
found = paceline.run(train, die, n=3, min=2)
used = time.process_time() - used
assert set(found) == {0, 1}, found
assert abs(found[0] - alone[0]) < 1e-5, (alone, found)
assert used < 0.8, f"the launcher took {used} s of CPU"
"""
    done = run(code, tmp_path)
    assert re.search(r"paceline: rank 0 \(pid \d+\) was killed by SIGKILL; 2 of 3 workers are left\n", done.stderr)
    assert "[0] step 40 of 2" in done.stdout


def test_a_worker_that_is_started_again_takes_the_state_from_the_others(tmp_path: Path) -> None:
    code = """
once = sys.argv[0] + ".once"
def die(step):
    if step.number == 15 and step.rank == 1 and not os.path.exists(once):
        with open(once, "w") as file:
            file.write(str(step.generation))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    return step.number > 15 and step.world == 3 and step.generation > int(open(once).read())
found = paceline.run(train, die, 10**6, n=3, min=2, restarts=1)
assert set(found) == {0, 1, 2}, found
assert len(set(found.values())) == 1, found
"""
    assert "as a new worker in 0.1 s (its only restart)" in run(code, tmp_path).stderr


def test_an_error_names_the_rank_and_the_line_of_the_function(tmp_path: Path) -> None:
    code = """
def fail(step):
    if step.number == 5 and step.rank == 1:
        raise ValueError("a bad sample: 3 µs")
try:
    paceline.run(train, fail, n=2)
except RuntimeError as error:
    print("raised:", error)
"""
    done = run(code, tmp_path)
    number = 1 + next(n for n, line in enumerate((TRAIN + code).splitlines()) if "raise ValueError" in line)
    told = done.stdout[done.stdout.index("raised:") :].splitlines()
    assert re.fullmatch(
        r"raised: rank 1 \(pid \d+\) ended with exit code 1: ValueError: a bad sample: 3 µs", told[0]
    ), told
    assert told[1:] == [
        f'  File "{tmp_path}/cell.py", line {number}, in fail',
        '    raise ValueError("a bad sample: 3 µs")',
    ]
    assert f"line {number}, in fail" in done.stderr  # as the worker printed it
    assert "_forked.py" not in done.stderr


def test_results_come_back_if_enough_workers_came_to_the_end(tmp_path: Path) -> None:
    """Also if one fails last; and an earlier error in its place is not taken for the reason."""
    code = """
def f(session):
    pids = session.group.all_gather_object(os.getpid())
    while session.rank == 0 and any(os.path.exists(f"/proc/{pid}") for pid in pids[1:]):
        time.sleep(0.01)
    if session.rank == 0:
        sys.exit("no room for a plot")
    return session.rank
assert paceline.run(f, n=3, min=2) == {1: 1, 2: 2}
def g(session):
    session.barrier("all are there")
    if not os.path.exists("once"):
        open("once", "w").close()
        raise ValueError("the first time")
    os.kill(os.getpid(), signal.SIGKILL)
os.chdir(os.path.dirname(sys.argv[0]))
try:
    paceline.run(g, n=1, restarts=1)
except RuntimeError as error:
    assert str(error).endswith("was killed by SIGKILL"), error
else:
    raise AssertionError
try:
    paceline.run(lambda session: object(), n=1)
except RuntimeError as error:
    assert "UnsupportedOp: what <lambda>() returned cannot be brought back: " in str(error), error
else:
    raise AssertionError
"""
    assert "[0] no room for a plot\n" in run(code, tmp_path).stderr


def test_workers_have_streams_handlers_and_numbers_of_their_own(tmp_path: Path) -> None:
    code = """
import atexit, logging, multiprocessing, random, threading
logging.basicConfig(format="log: %(message)s")
logging.getLogger("other").addHandler(logging.StreamHandler(sys.stdout))
signal.signal(signal.SIGCONT, lambda *_: 1 / 0)
atexit.register(print, "the notebook ends")
sys.stdout.write("once, ")
def f(session):
    assert sys.stdin.read() == ""
    threading.Thread(target=lambda: time.sleep(1) or print(f"worker {session.rank} ends")).start()
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
    process.start()
    logging.warning("of %d", session.rank)
    logging.getLogger("other").error("other of %d", session.rank)
    os.kill(os.getpid(), signal.SIGCONT)
    session.barrier("all are there")
    return [random.random(), float(np.random.random()), os.getsid(0) == os.getpid(), process.pid]
(a, b, own, first), (c, d, _, second) = paceline.run(f, n=2).values()
assert a != c and b != d and own
assert not any(os.path.exists(f"/proc/{pid}") for pid in (first, second))
"""
    done = run(code, tmp_path)
    for rank in (0, 1):
        for printed in (f"[{rank}] worker {rank} ends\n", f"[{rank}] other of {rank}\n"):
            assert done.stdout.count(printed) == 1
        assert done.stderr.count(f"[{rank}] log: of {rank}\n") == 1
    assert done.stdout.count("once, ") == done.stdout.count("the notebook ends") == 1


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
import threading
def left():
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    here = os.path.join(os.environ["TMPDIR"], f"paceline-{os.getuid()}", "coordinators")
    coordinators = os.listdir(here) if os.path.isdir(here) else []
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    return files, threads, signal.getsignal(signal.SIGINT), wakeup, coordinators
before = left()
paceline.run(train, n=2)
try:
    paceline.run(lambda session: 1 / 0, n=2)
except RuntimeError:
    pass
assert left() == before, (before, left())
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no children")
"""
    assert "no children" in run(code, tmp_path).stdout


def test_an_interrupt_lets_workers_leave_after_their_step(tmp_path: Path) -> None:
    code = """
def rest(step):
    time.sleep(0.02)
try:
    paceline.run(train, rest, 10**6, n=3, min=1)
except KeyboardInterrupt:
    print("interrupted")
"""
    with running(code, tmp_path, "step 20") as process:
        children = children_of(process.process.pid)
        assert len(children) == 4, "three workers and a coordinator"
        process.signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.stdout.endswith("interrupted\n")
        assert process.stderr.count("paceline: stopping 3 workers\n") == 1
        assert "Traceback" not in process.stderr
        wait_until_gone(children)


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    code = """
def hang(step):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if step.number == 11:
        time.sleep(1000)
paceline.run(train, hang, n=2, min=1)
"""
    with running(code, tmp_path, "step 10") as process:
        process.signal(signal.SIGINT)
        process.wait_for("stopping 2 workers")
        process.signal(signal.SIGINT)
        assert process.wait() != 0
        assert "killing 2 workers" in process.stderr
        assert process.stderr.endswith("KeyboardInterrupt\n")


def test_sigterm_ends_the_workers_and_then_the_process(tmp_path: Path) -> None:
    with running("paceline.run(train, lambda step: time.sleep(0.05), 10**6, n=2)", tmp_path, "step 10") as process:
        children = children_of(process.process.pid)
        process.signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
        assert process.stderr.startswith("paceline: stopping 2 workers\n")
        assert "Traceback" not in process.stderr
        wait_until_gone(children)


def test_a_worker_that_is_drained_returns_nothing(tmp_path: Path) -> None:
    code = """
def rest(step):
    time.sleep(0.02)
    return step.number > 10 and step.world == 2
print(sorted(paceline.run(train, rest, 10**6, n=3, min=1)))
"""
    with running(code, tmp_path, "step 10 of 3") as process:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-m", "paceline", "drain", "notebook", "1"]
        subprocess.run(command, env=environment, check=True, timeout=60)
        assert process.wait() == 0, str(process)
        assert process.stdout.endswith("[0, 1]\n")


def test_a_run_ends_if_its_coordinator_is_dead_when_it_is_needed(tmp_path: Path) -> None:
    code = """
import subprocess
def die(step):
    time.sleep(0.02)
    if step.number >= 15 and step.rank == 0:
        subprocess.run(["pkill", "-KILL", "-P", str(notebook), "-f", "import serve; serve()"], check=True)
        os.kill(os.getpid(), signal.SIGKILL)
notebook = os.getpid()
try:
    paceline.run(train, die, 10**6, n=3, min=2)
except RuntimeError as error:
    print(error)
"""
    assert "OrphanedError" in run(code, tmp_path).stderr


def test_workers_die_with_the_notebook(tmp_path: Path) -> None:
    with running("paceline.run(train, lambda step: time.sleep(0.05), 10**6, n=2)", tmp_path, "step 10") as process:
        children = children_of(process.process.pid)
        assert len(children) == 3
        process.signal(signal.SIGKILL)
        wait_until_gone(children)


def test_a_process_that_uses_grpc_itself_is_refused(tmp_path: Path) -> None:
    code = """
from paceline.testing import coordinator
with coordinator():
    pass
paceline.run(train, n=2)
"""
    with running(code, tmp_path) as process:
        assert process.wait() == 1
        assert "it has joined a job or asked a coordinator itself, and grpc does not survive a fork" in process.stderr


def test_an_interactive_python_runs_it_too() -> None:
    typed = 'import paceline\ndef f(session): session.barrier("x"); return session.rank\n\npaceline.run(f, n=2)\n'
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=typed, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "{0: 0, 1: 1}", done.stderr


class Kernel:
    """A Jupyter kernel, as a notebook has it."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        # ipykernel leaves the descriptors 1 and 2 as they are where pytest seems to run it.
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=60, env=environment)

    def begin(self, code: str) -> str:
        """Begins to execute a cell; returns its id."""
        return str(self.client.execute(code))

    def printed(self, cell: str, until: str | None = None, seconds: float = 60.0) -> str:
        """Returns what a cell prints and shows until its end, or until it has printed a text."""
        output, deadline = "", time.monotonic() + seconds
        while until is None or until not in output:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            kind, content = message["header"]["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell:
                continue
            if kind == "stream":
                output += content["text"]
            elif kind == "error":
                output += f"{content['ename']}: {content['evalue']}\n"
            elif kind == "execute_result":
                output += content["data"]["text/plain"] + "\n"
            elif kind == "status" and content["execution_state"] == "idle":
                break
        return output

    def shows(self, code: str) -> str:
        """Executes a cell; returns what it prints and shows."""
        return self.printed(self.begin(code))


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    try:
        yield made
    finally:
        made.client.stop_channels()
        made.manager.shutdown_kernel(now=True)


@pytest.mark.timeout(180)
def test_a_notebook_shows_lines_while_workers_run_and_can_interrupt_them(kernel: Kernel) -> None:
    assert kernel.shows(TRAIN) == ""
    whole = kernel.shows("paceline.run(train, n=2)").splitlines()
    assert [line for line in whole if line.startswith("[0] step")] == [f"[0] step {n} of 2" for n in (10, 20, 30, 40)]
    assert set(losses(whole[-1])) == {0, 1}
    endless = kernel.begin("paceline.run(train, lambda step: time.sleep(0.02), 10**6, n=2, min=1)")
    kernel.printed(endless, until="step 20 of 2")
    kernel.manager.interrupt_kernel()
    assert kernel.printed(endless).endswith("KeyboardInterrupt: \n")
    logs = "import logging\nlogging.basicConfig()\npaceline.run(lambda session: logging.warning('told'), n=2)"
    told = re.findall(r".*WARNING.*", kernel.shows(logs))
    assert sorted(line.replace("#", "") for line in told) == ["[0] WARNING:root:told", "[1] WARNING:root:told"]
    asked = kernel.shows("paceline.run(lambda session: input('Go on?'), n=1)")
    assert "EOFError: a worker has no standard input: ask before paceline.run" in asked
    bad = kernel.shows("def f(session):\n    return 1 / 0\n\npaceline.run(f, n=2)")
    assert re.search(r"RuntimeError: \S+ #?\d \(pid \d+\) ended with exit code 1: ZeroDivisionError: .*\n", bad), bad
    assert bad.endswith(", line 2, in f\n    return 1 / 0\n")
    assert kernel.shows("sorted(paceline.run(train, n=3))").endswith("[0, 1, 2]\n")
