"""What a job says of itself: once, not once for each rank, and to the point."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from support.command import Command, command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl")

TRAIN = """
import os, signal, sys
import numpy as np
import paceline
from paceline import nn, optim

x = np.ones((12, 2), np.float32)
with paceline.join() as session:
    model = nn.Sequential(nn.Linear(2, 2, rng=np.random.default_rng(0)))
    ddp = paceline.DDP(model, session.group)
    optimizer = optim.SGD(ddp, lr=0.0)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=paceline.ElasticSampler(12, 6, 0))
    for step in session.steps(state, total=int(sys.argv[1]), checkpoint_dir=sys.argv[2], checkpoint_every=2):
        with step:
            _, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), np.zeros(len(step.indices), np.int64))
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            optimizer.step()
        print("did", step.number)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(TRAIN)
    return str(tmp_path / "train.py")


def address_of(coordinator: Command) -> str:
    coordinator.wait_for("listens on")
    found = re.search(r"listens on (\S+)", coordinator.stderr)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_a_finished_job_is_reported_once_and_can_be_restarted(script: str, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    with command("coordinator", "--listen", "127.0.0.1:0") as coordinator:
        where = {"PACELINE_COORDINATOR": address_of(coordinator)}

        def run(total: int, folder: str) -> Command:
            with command("run", "-n", "2", "--job", "digits", script, str(total), folder, **where) as ended:
                assert ended.wait() == 0, str(ended)
                return ended

        first = run(4, kept)
        assert first.complaints == ""
        again = run(4, str(tmp_path / "empty"))
        done = "paceline: job 'digits' is done (step 4); `paceline restart digits` starts it anew"
        assert again.complaints == f"{done}\n", "once, and without steps"
        assert again.stdout == ""
        with_checkpoint = run(4, kept)
        assert re.fullmatch(
            rf"{re.escape(done)}, from step 4 of checkpoint {re.escape(kept)}/\S+\n", with_checkpoint.complaints
        )
        with command("restart", "digits", **where) as restarted:
            assert restarted.wait() == 0
        resumed = run(6, kept)
        pattern = rf"paceline: job 'digits' resumed from step 4 of checkpoint {re.escape(kept)}/\S+\n"
        assert re.fullmatch(pattern, resumed.complaints), str(resumed)
        assert sorted(re.findall(r"did \d+", resumed.stdout)) == ["did 5", "did 5", "did 6", "did 6"]
        with command("restart", "digits", **where) as restarted:
            assert restarted.wait() == 0
        anew = run(4, str(tmp_path / "new"))
        assert anew.stdout.count("did 1\n") == 2, str(anew)
        coordinator.signal(signal.SIGTERM)
        assert coordinator.wait() == 0
        last_words = re.findall(r"the job is done: its last step was 4$", coordinator.stderr, re.MULTILINE)
        assert len(last_words) == 2, f"once for each time that it was done\n{coordinator}"


def test_a_warning_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(TRAIN.replace("    model =", "    session.rank\n    model =", 1))
    with command("run", "-n", "3", str(script), "2", str(tmp_path / "kept")) as run:
        assert run.wait() == 0
    assert run.stderr.count("session.rank was read before session.steps()") == 1
    assert run.complaints.startswith("paceline: session.rank was read")


@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "asked"])
def test_the_flight_records_of_a_failure_are_reported_once_if_one_asks(tmp_path: Path, asked: bool) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import os, numpy as np, paceline\n"
        "with paceline.join() as session:\n"
        "    session.group.all_reduce(np.ones(4))\n"
        "    print('in the loop', session.rank, os.getpid())\n"
        "    while True: session.group.all_reduce(np.ones(4))\n"
    )
    with command("run", "-n", "4", str(script), **({"PACELINE_TRACEBACK": "1"} if asked else {})) as run:
        run.wait_for("in the loop", 4)
        found = re.search(r"in the loop 1 (\d+)", run.stdout)
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        assert run.wait() == 137
    records = [line for line in run.stderr.splitlines() if "operations are in" in line]
    assert len(records) == asked
    told = r"paceline: the last \d+ operations are in \S+\.json \(each rank of this host has such a file\)"
    assert all(re.fullmatch(told, record) for record in records)
