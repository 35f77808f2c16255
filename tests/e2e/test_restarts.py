"""`paceline run` of elastic jobs: workers that fail are started again, or the others go on without them.

Most scripts never join, so no coordinator is needed; the address leads nowhere.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from support.command import Command, command, wait_until_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

NOWHERE = ("--coordinator", "127.0.0.1:1")

FAILING = """
    import os, sys
    print("pid", os.getpid())
    for number in range(int(sys.argv[2])):
        try:
            os.mkdir(f"{sys.argv[1]}/{number}")  # so many processes fail, whichever they are
        except FileExistsError:
            continue
        sys.exit(3)
"""

SURVIVED = """
    import os, sys, time
    folder = sys.argv[1]
    try:
        os.mkdir(f"{folder}/victim")
    except FileExistsError:
        while not os.path.exists(f"{folder}/pid"):
            time.sleep(0.01)
        victim = int(open(f"{folder}/pid").read())
        while True:
            try:
                os.kill(victim, 0)
            except ProcessLookupError:  # the launcher has seen its end
                break
            time.sleep(0.01)
    else:
        open(f"{folder}/written", "w").write(str(os.getpid()))
        os.rename(f"{folder}/written", f"{folder}/pid")
        os.kill(os.getpid(), 9)
"""

AGAIN = """
import os
import numpy as np
import paceline

with paceline.join(timeout=30.0) as session:
    group = session.group
    total = int(group.all_reduce(np.array([session.rank + 1]))[0])
    print("in generation", session.generation, "rank", session.rank, "pid", os.getpid(), "sum", total)
    while session.generation == 1:
        group.all_reduce(np.ones(1000))
"""


ELASTIC = """
import os
import time
import numpy as np
import paceline
from paceline import nn

with paceline.join() as session:
    model = nn.Linear(4, 2, rng=np.random.default_rng(1))
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(model, lr=0.1)
    x = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
    t = (x.sum(axis=1) > 0).astype(np.int64)
    sampler = paceline.ElasticSampler(len(x), global_batch=24)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(state, total=60):
        with step:
            time.sleep(0.02)
            _, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            optimizer.step()
        if step.applied:
            print("pid", os.getpid(), "applied", step.number, "of", session.size, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "marks").mkdir()
    return str(tmp_path / "marks")


def write(folder: str, code: str) -> str:
    script = Path(folder).parent / "script.py"
    script.write_text(textwrap.dedent(code))
    return str(script)


def pids(run: Command) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", run.stdout)]


@pytest.mark.slow
def test_a_worker_that_fails_twice_is_started_three_times(folder: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    arguments = ("--restarts", "3", "--log-dir", str(logs), *NOWHERE, write(folder, FAILING), folder, "2")
    with command("run", "-n", "1", *arguments) as run:
        assert run.wait() == 0, str(run)
    first, second, third = pids(run)
    assert run.stderr.splitlines() == [
        f"paceline: restarting worker #0 (pid {first} ended with exit code 3) as a new worker in 0.1 s "
        "(1 of its 3 restarts)",
        f"paceline: restarting worker #0 (pid {second} ended with exit code 3) as a new worker in 0.2 s "
        "(2 of its 3 restarts)",
    ]
    log = (logs / "worker-0.log").read_text().splitlines()
    assert [line for line in log if line.startswith("# pid")] == [f"# pid {pid}" for pid in (first, second, third)]


@pytest.mark.slow
def test_the_launcher_fails_when_restarts_are_used_up(folder: str) -> None:
    with command("run", "-n", "1", "--restarts", "1", *NOWHERE, write(folder, FAILING), folder, "9") as run:
        assert run.wait() == 3, str(run)
    assert len(pids(run)) == 2
    last = run.stderr.splitlines()[-1]
    assert last == f"paceline: worker #0 (pid {pids(run)[1]}) ended with exit code 3; its only restart is used up"


@pytest.mark.slow
def test_a_worker_that_repeatedly_dies_at_once_is_given_up(folder: str) -> None:
    script = Path(write(folder, '#!/bin/sh\necho "pid $$"\nexit 3\n'))  # Python may take 5 s to start
    script.chmod(0o755)
    with command("run", "-n", "1", "--restarts", "9", *NOWHERE, "--no-python", str(script)) as run:
        assert run.wait() == 3, str(run)
    assert len(pids(run)) == 3
    assert run.stderr.splitlines()[-1] == (
        "paceline: giving up on worker #0: it failed 3 times in a row within 5 s, before it had joined the job; "
        f"the last process (pid {pids(run)[2]}) ended with exit code 3"
    )


@pytest.mark.slow
def test_the_others_finish_the_job_without_a_lost_worker(folder: str) -> None:
    with command("run", "-n", "3", "--min", "1", *NOWHERE, write(folder, SURVIVED), folder) as run:
        assert run.wait() == 0, str(run)
    lost, through = run.stderr.splitlines()
    assert re.fullmatch(r"paceline: worker #\d \(pid \d+\) was killed by SIGKILL; 2 of 3 workers here are left", lost)
    assert re.fullmatch(
        r"paceline: the others finished the job without worker #\d \(pid \d+ was killed by SIGKILL\)", through
    )


@pytest.mark.slow
def test_a_job_of_fixed_size_fails_when_a_worker_is_killed(folder: str) -> None:
    with command("run", "-n", "3", *NOWHERE, write(folder, SURVIVED), folder) as run:
        assert run.wait() == 137, str(run)
    assert re.fullmatch(r"paceline: worker #\d \(pid \d+\) was killed by SIGKILL\n", run.stderr)


@pytest.mark.slow
def test_workers_are_stopped_when_too_few_can_ever_remain(folder: str) -> None:
    code = """
        import os, signal, sys, time
        fails, stays = f"{sys.argv[1]}/fails", f"{sys.argv[1]}/stays"
        try:
            os.mkdir(fails)
        except FileExistsError:
            try:
                os.mkdir(stays)
            except FileExistsError:
                sys.exit(9)
            signal.pause()
        while not os.path.exists(stays):  # the other one is there, which its replacement would be otherwise
            time.sleep(0.01)
        sys.exit(9)
    """
    # It embeds a coordinator, so nobody else can come. The grace is failure_timeout + 5 s: as short as it can be here.
    arguments = ("run", "-n", "2", "--restarts", "1", write(folder, code), folder)
    with command(*arguments, PACELINE_FAILURE_TIMEOUT="0.01") as run:
        assert run.wait() == 9, str(run)
    again, used_up, stopping = run.stderr.splitlines()
    assert again.endswith("as a new worker in 0.1 s (its only restart)")
    assert used_up.endswith("its only restart is used up; the job needs 2 workers and cannot get them any more")
    assert re.fullmatch(r"paceline: stopping worker #\d, still running after the first failure", stopping)


@pytest.mark.slow
def test_no_worker_is_restarted_after_sigterm(folder: str) -> None:
    code = "import os, signal; print('pid', os.getpid()); signal.pause()"
    with command("run", "-n", "2", "--restarts", "5", *NOWHERE, write(folder, code)) as run:
        run.wait_for("pid ", 2)
        run.signal(signal.SIGTERM)
        assert run.wait() == 143, str(run)
    assert run.complaints == "paceline: stopping 2 workers\n"
    wait_until_gone(pids(run))


@pytest.mark.slow
def test_ctrl_c_while_a_restart_is_pending_ends_the_launcher(folder: str) -> None:
    # Each worker tells of a view before it fails, so it is not given up, and pauses grow long enough to come between.
    code = """
        import os, signal, sys
        from paceline._session.launcher_pipe import tell_launcher
        tell_launcher("view", {"pid": os.getpid(), "rank": 0, "world_size": 1, "generation": 1})
        if len(os.listdir(sys.argv[1])) == 5:
            signal.pause()  # the interrupt comes late
        os.mkdir(f"{sys.argv[1]}/{os.getpid()}")
        os._exit(3)
    """
    with command("run", "-n", "1", "--restarts", "9", write(folder, code), folder) as run:
        run.wait_for("in 1.6 s (5 of its 9 restarts)")
        run.signal(signal.SIGINT)
        assert run.wait() == 130, str(run)
    assert run.stderr.count("restarting rank 0") == 5


@pytest.mark.slow
def test_workers_of_an_elastic_job_have_time_to_leave(folder: str) -> None:
    code = """
        import os, signal, sys, time
        def leave(*_):
            time.sleep(6)  # a step that is longer than the 5 s after which a job of fixed size is killed
            print("left in good order")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("pid", os.getpid())
        while True:
            signal.pause()
    """
    with command("run", "-n", "2", "--min", "1", *NOWHERE, write(folder, code)) as run:
        run.wait_for("pid ", 2)
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, str(run)
    assert run.stdout.count("left in good order") == 2
    assert run.complaints == "paceline: stopping 2 workers\n"


def test_a_killed_member_and_its_failed_peer_meet_again(folder: str) -> None:
    with command("run", "-n", "2", "--restarts", "2", write(folder, AGAIN)) as run:
        run.wait_for("in generation 1", 2)
        found = re.search(r"in generation 1 rank 1 pid (\d+)", run.stdout)
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        assert run.wait() == 0, str(run)
    killed = f"rank 1 (pid {found[1]} was killed by SIGKILL)"
    again = f"paceline: restarting {killed} as a new worker in 0.1 s (1 of its 2 restarts)"
    assert again in run.stderr.splitlines(), str(run)
    assert len(re.findall(r"in generation 2 rank \d pid \d+ sum 3", run.stdout)) == 2, str(run)


DIES = """
            number = os.environ["PACELINE_LOCAL_RANK"]  # a survivor's rank may change when another one is killed
            if step.number == 5 and number != "0":
                with contextlib.suppress(FileExistsError):
                    os.mkdir(f"{sys.argv[1]}/{number}")
                    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_job_of_fixed_size_continues_with_replacements(folder: str, world: int) -> None:
    """What a user of torchrun tries first: all but one are killed, and no --min is given."""
    script = write(folder, "import contextlib, sys\n" + ELASTIC + DIES)
    with command("run", "-n", str(world), "--restarts", str(world), script, folder) as run:
        assert run.wait() == 0, str(run)
    applied: dict[int, list[int]] = {}
    for pid, step, size in re.findall(r"pid (\d+) applied (\d+) of (\d+)", run.stdout):
        assert int(size) == world
        applied.setdefault(int(pid), []).append(int(step))
    (left,) = [steps for steps in applied.values() if (steps[0], steps[-1]) == (1, 60)]
    assert left == list(range(1, 61)), "the one that was left lost no step, and did none twice"
    assert sum(steps[-1] == 60 for steps in applied.values()) == world
    assert run.stderr.count("as a new worker") == world - 1


KILLS = 5

KILLED = f"""
            killed_in = [int(generation) for generation in os.listdir(sys.argv[1])]
            if len(killed_in) < {KILLS}:
                if step.number % 20 == 0 and session.size > 1 and session.rank == 1:
                    os.mkdir(f"{{sys.argv[1]}}/{{session.generation}}")
                    os.kill(os.getpid(), 9)
            elif session.size == 3 and session.generation > max(killed_in):
                session.stop()  # all that were killed have been replaced
"""


def test_a_storm_of_kills_loses_and_repeats_no_step(folder: str) -> None:
    """Whenever two train together, one of them is dead 20 steps later: faster than new processes would make up for."""
    script = write(folder, "import sys\n" + ELASTIC.replace("total=60", "total=1_000_000") + KILLED)
    with command("run", "-n", "3", "--min", "1", "--restarts", "9", script, folder) as run:
        assert run.wait(120.0) == 0, str(run)
    assert run.stderr.count("as a new worker") == len(os.listdir(folder)) == KILLS
    told = [(int(pid), int(step)) for pid, step in re.findall(r"pid (\d+) applied (\d+) of", run.stdout)]
    assert {step for _, step in told} == set(range(1, max(step for _, step in told) + 1)), "the line was never lost"
    for pid in {pid for pid, _ in told}:
        steps = [step for one, step in told if one == pid]
        # A survivor that was a step behind takes that step with another's state.
        assert steps == sorted(set(steps)), "no step was done again"


COMPILING = """
    import os
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    print("finds", os.path.exists(folder), "in", folder, flush=True)
    os.makedirs(folder)
    open(f"{folder}/half.so", "w").close()
    mine = os.path.dirname(folder)
    while os.listdir(os.path.dirname(mine)) != [os.path.basename(mine)]:
        pass  # until the launcher has removed what the one before has left
    os.kill(os.getpid(), 9)
"""


def test_a_restarted_worker_gets_a_fresh_compile_cache(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(COMPILING))
    with command("run", "-n", "1", "--restarts", "2", *NOWHERE, str(script), TMPDIR=str(tmp_path)) as run:
        assert run.wait() == 128 + signal.SIGKILL, str(run)
    folders = re.findall(r"finds False in (\S+)", run.stdout)
    assert len(set(folders)) == 3, str(run)
    assert not any(Path(folder).parents[1].exists() for folder in folders)


LEAVES_EARLY = """
import os
import numpy as np
import paceline
with paceline.join() as session:
    for step in session.steps(paceline.TrainState(notes={}), total=1_000_000):
        with step:
            session.group.all_reduce(np.ones(4))
        if step.number == 5 and step.rank == 0:
            os._exit(0)
"""


def test_a_worker_that_exits_with_0_before_the_last_step_ends_the_job(folder: str) -> None:
    with command("run", "-n", "2", "--min", "2", write(folder, LEAVES_EARLY)) as run:
        assert run.wait(60.0) == 1, str(run)
    early = "ended with exit code 0 before the last step; the job needs 2 workers and cannot get them any more"
    assert early in run.stderr


COMES_LATE = """
import os, signal, sys, time
import numpy as np
import paceline
killed, started, done = (f"{sys.argv[1]}/{mark}" for mark in ("killed", "started", "done"))
late = os.path.exists(killed)
if late:
    os.mkdir(started)
while late and not os.path.exists(done):
    time.sleep(0.01)
with paceline.join() as session:
    if late:
        session.rank
    for step in session.steps(paceline.TrainState(notes={}), total=1_000_000):
        with step:
            session.group.all_reduce(np.ones(4))
            if step.rank == 1:
                os.mkdir(killed)
                os.kill(os.getpid(), signal.SIGKILL)
        if step.world == 1 and os.path.exists(started):
            session.stop()
os.mkdir(done)
"""


def test_a_worker_that_reads_its_rank_after_the_last_step_exits_cleanly(folder: str) -> None:
    with command("run", "-n", "2", "--min", "1", "--restarts", "2", write(folder, COMES_LATE), folder) as run:
        assert run.wait(60.0) == 0, str(run)
    assert re.search(r"is done \(step \d+\)", run.stderr), str(run)
    assert "2 of its 2" not in run.stderr, "one restart is enough"
