"""`paceline status --watch` on a terminal, beside a job whose workers freeze and die."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from e2e.terminal import terminal

from support.command import command
from support.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl")

ELASTIC = """
import os, time
import numpy as np
import paceline
from paceline import nn, optim

x = np.ones((12, 2), np.float32)
with paceline.join() as session:
    model = nn.Sequential(nn.Linear(2, 2, rng=np.random.default_rng(0)))
    ddp = paceline.DDP(model, session.group)
    optimizer = optim.SGD(ddp, lr=0.0)
    sampler = paceline.ElasticSampler(12, 6, 0)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    said = False
    for step in session.steps(state, total=1_000_000):
        with step:
            _, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), np.zeros(len(step.indices), np.int64))
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            optimizer.step()
        if step.world == 3 and not said:
            said = True
            print("trains", session.rank, os.getpid())
        time.sleep(0.05)
"""


def test_watch_shows_a_frozen_worker_as_silent_and_lists_a_killed_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    with command("run", "-n", "3", "--min", "1", "--job", "digits", str(script), PACELINE_FAILURE_TIMEOUT="9") as run:
        run.wait_for("trains", 3)
        pids = {int(line.split()[2]): int(line.split()[3]) for line in run.stdout.splitlines() if "trains" in line}
        with terminal("status", "--watch", "digits") as shown:
            shown.wait_for("running")
            shown.wait_for("training")
            os.kill(pids[0], signal.SIGSTOP)
            shown.wait_for_match(r"silentfor[3-8]\.")
            os.kill(pids[0], signal.SIGCONT)
            os.kill(pids[1], signal.SIGKILL)
            shown.wait_for_match(rf"{pids[1]}-+waskilledbySIGKILL,")
            shown.wait_for("lost 1")
            shown.press("\x03")
            assert shown.wait() == 0
            assert "Traceback" not in shown.text
            assert shown.raw.count("\x1b[?25l") == shown.raw.count("\x1b[?25h"), "the cursor is there again"
            assert "…" not in shown.text
        run.signal(signal.SIGINT)
        assert run.wait() == 130


def test_watch_keeps_asking_an_absent_coordinator() -> None:
    port = str(free_port())
    address = f"127.0.0.1:{port}"
    with terminal("status", "--watch", "--coordinator", address) as shown:
        shown.wait_for_match(rf"nocoordinatoranswersat{address},for\d+snow;stilltrying\(Ctrl-Cendsthis\)")
        with command("coordinator", "--listen", address) as coordinator:
            shown.wait_for("The coordinator knows no job yet.")
            coordinator.signal(signal.SIGTERM)
            assert coordinator.wait() == 0
        shown.wait_for_match(r"Thecoordinatorknowsnojobyet\..*for[1-9]\d*snow")
        shown.press("\x03")
        assert shown.wait() == 0
        assert "Traceback" not in shown.text


def test_watch_needs_a_terminal() -> None:
    with command("status", "--watch", "--coordinator", "127.0.0.1:1") as ended:
        assert ended.wait() == 2
    assert ended.stderr == "paceline: --watch draws on a terminal: for a file or a program use --json\n"
