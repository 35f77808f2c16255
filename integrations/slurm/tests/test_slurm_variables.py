"""`paceline run` with the variables that srun sets, without a Slurm: what it makes of them, and what it refuses."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from paceline.testing import coordinator
from support.command import command
from support.ports import free_port

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "digits",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_CPUS_PER_TASK": "2",
}

ECHO = """
    import os
    print(*(os.environ["PACELINE_" + name] for name in ("JOB", "MIN_WORKERS", "MAX_WORKERS")))
"""

TRAIN = """
    import os, signal, time
    import numpy as np
    import paceline
    from paceline import nn

    with paceline.join() as session:
        model = nn.Linear(4, 2, rng=np.random.default_rng(1))
        ddp = paceline.DDP(model, session.group)
        optimizer = paceline.optim.SGD(model, lr=0.1)
        x, t = np.zeros((60, 4), np.float32), np.zeros(60, np.int64)
        sampler = paceline.ElasticSampler(len(x), global_batch=12)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        together = alone = 0
        for step in session.steps(state, total=100_000):
            with step:
                together += session.size == 2
                if os.environ["SLURM_PROCID"] == "0" and together > 5:
                    os._exit(3)
                time.sleep(0.02)
                loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
                optimizer.zero_grad()
                ddp.backward(dy, step.weight)
                optimizer.step()
            alone += together > 0 and session.size == 1
            if alone == 20:
                print("trained on alone")
                os.kill(os.getpid(), signal.SIGTERM)
"""


def script(folder: Path, code: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(code))
    return str(path)


def test_a_single_task_takes_workers_and_name_from_slurm(tmp_path: Path) -> None:
    with command("run", script(tmp_path, ECHO), **STEP) as run:
        assert run.wait() == 0
    assert sorted(run.stdout.splitlines()) == ["[#0] digits 2 2", "[#1] digits 2 2"]


def test_command_line_options_override_slurm(tmp_path: Path) -> None:
    with command("run", "-n", "1", "--min", "1", "--job", "mine", script(tmp_path, ECHO), **STEP) as run:
        assert run.wait() == 0
    assert run.stdout == "[#0] mine 1 1\n"


def test_several_tasks_need_a_token(tmp_path: Path) -> None:
    with command("run", script(tmp_path, ECHO), **STEP | {"SLURM_STEP_NUM_TASKS": "2"}) as run:
        assert run.wait() == 2
    assert "export PACELINE_TOKEN=$(openssl rand -hex 32)" in " ".join(run.stderr.split())


def test_each_of_two_tasks_counts_the_workers_of_both(tmp_path: Path) -> None:
    with coordinator() as address:
        variables = STEP | {"SLURM_STEP_NUM_TASKS": "2", "PACELINE_COORDINATOR": address}
        with command("run", script(tmp_path, ECHO), **variables) as run:
            assert run.wait() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[#0] digits 4 4", "[#1] digits 4 4"]


def test_tasks_count_replicas_if_their_workers_are_the_ranks_of_one(tmp_path: Path) -> None:
    with coordinator() as address:
        variables = STEP | {"SLURM_STEP_NUM_TASKS": "3", "PACELINE_COORDINATOR": address}
        with command("run", "--replica-size", "2", script(tmp_path, ECHO), **variables) as run:
            assert run.wait() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[#0.0] digits 3 3", "[#0.1] digits 3 3"]


@pytest.mark.slow
def test_the_first_task_serves_until_the_others_are_done(tmp_path: Path) -> None:
    variables = STEP | {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_CPUS_PER_TASK": "1", "PACELINE_TOKEN": "a" * 64,
        "PACELINE_SLURM_PORT": str(free_port()),
    }  # fmt: skip
    arguments = ("run", "--min", "1", script(tmp_path, TRAIN))
    with command(*arguments, **variables) as first:
        first.wait_for("the coordinator of this step listens")
        with command(*arguments, **variables | {"SLURM_PROCID": "1"}) as second:
            assert second.wait() == 0, first.stderr
        assert first.wait() == 3
    assert "trained on alone" in second.stdout
    assert "serves the coordinator until no worker is left in the job (now 1)" in first.stderr
