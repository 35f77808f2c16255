"""Training under a real Slurm: two sbatch scripts of deploy/slurm, a node's death, preemption, requeue, the time limit.

`pytest -s` prints the times that docs/how-to/slurm.md shows.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline_slurm._step import expand_hostlist
from support.slurm import Cluster, cluster

pytestmark = [pytest.mark.needs(what="slurm"), pytest.mark.slow]

SCRIPTS = Path(__file__).parents[3] / "deploy" / "slurm"

GLOBAL_BATCH = 12

TRAIN = """
    import json, os, sys, time
    import numpy as np
    import paceline
    from paceline import nn

    folder, total = sys.argv[1], int(sys.argv[2])
    with paceline.join() as session:
        model = nn.Linear(4, 2, rng=np.random.default_rng(1))
        ddp = paceline.DDP(model, session.group)
        optimizer = paceline.optim.SGD(model, lr=0.1)
        x = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
        t = (x.sum(axis=1) > 0).astype(np.int64)
        sampler = paceline.ElasticSampler(len(x), global_batch=12)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        log = open(f"{folder}/{os.uname().nodename}-{os.getpid()}.jsonl", "a", buffering=1)
        for step in session.steps(state, total=total, checkpoint_dir=f"{folder}/runs"):
            with step:
                time.sleep(float(os.environ.get("STEP_S", "0.03")))
                loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
                optimizer.zero_grad()
                ddp.backward(dy, step.weight)
                optimizer.step()
            if step.applied:
                line = {"step": step.number, "at": time.time(), "samples": [int(i) for i in step.indices]}
                log.write(json.dumps(line) + "\\n")
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


class Line(NamedTuple):
    """One step that one worker has applied: who, when (seconds since the epoch), and with which samples."""

    worker: str
    step: int
    at: float
    samples: list[int]


class Training:
    """A training script, and what its workers have written: one line for each step that they have applied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(textwrap.dedent(TRAIN))

    def lines(self) -> list[Line]:
        """All lines, each with its worker's file; a line that a killed worker has not ended is left out."""
        found = []
        for file in self.folder.glob("*.jsonl"):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    found.append(Line(file.stem, **json.loads(line)))
        return found

    def wait(self, what: str, done: Callable[[list[Line]], object], timeout: float = 60.0) -> None:
        """Waits until the lines fulfil a condition."""
        deadline = time.monotonic() + timeout
        while not done(self.lines()):
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}\n{self.outputs()}"
            time.sleep(0.02)

    def outputs(self) -> str:
        """What the batch scripts printed."""
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("*.out")))

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of `sbatch`, which Slurm hands on."""
        return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PACELINE_FLIGHT_DIR": "off", **more}

    def check_samples(self, total: int, may_miss: int = 0) -> None:
        """Checks that each step is there, with each sample once; of so many steps a dead worker's line may lack."""
        lines = self.lines()
        steps = {line.step for line in lines}
        assert steps == set(range(1, total + 1)), self.outputs()
        incomplete = 0
        for number in steps:
            samples = Counter(i for line in lines if line.step == number for i in line.samples)
            assert set(samples.values()) == {1}, f"step {number} used a sample twice: {samples}"
            incomplete += len(samples) < GLOBAL_BATCH
        assert incomplete <= may_miss, f"{incomplete} steps lack samples"


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def workers_of(lines: list[Line]) -> set[str]:
    return {line.worker for line in lines}


def longest_gap(lines: list[Line], begin: float, end: float) -> float:
    """The longest time in which no worker committed a step."""
    times = sorted(line.at for line in lines if begin <= line.at <= end)
    return max(b - a for a, b in pairwise(times))


def test_host_lists_expand_as_scontrol_expands_them(slurm: Cluster) -> None:
    for text in (
        "n1", "n[1-3,7]", "n[01-12]", "n[8-11]", "a,b[2,4-5],c-[09-10]", "r[1-2]n[1-3]", "n[0-3],login", "n[3,1-2]",
        "rack[00-01]node[098-101]", "x[5]",
    ):  # fmt: skip
        assert expand_hostlist(text) == slurm.run("scontrol", "show", "hostnames", text).split(), text


def test_training_continues_after_a_node_dies(slurm: Cluster, training: Training) -> None:
    job = slurm.submit(
        "--nodes=3", "--cpus-per-task=1", "--time=5", f"--output={training.folder}/%j.out",
        SCRIPTS / "train.sbatch", str(training.script), str(training.folder), "250",
        **training.environment(),
    )  # fmt: skip
    training.wait("three train", lambda lines: len(workers_of(lines)) == 3)
    dead = slurm.nodes[2]
    killed_at = time.time()
    dead.kill()  # slurmd, the launcher and its worker at once
    training.wait("two commit", lambda lines: any(line.at > killed_at + 1 for line in lines))
    print(f"\nnode killed: next step after {longest_gap(training.lines(), killed_at - 0.5, time.time()):.2f} s")
    ended = slurm.wait_for_state(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", timeout=60)
    assert ended["JobState"] == "COMPLETED", training.outputs()
    slurm.start_node(dead)
    training.check_samples(250, may_miss=1)
    slurm.wait_until_idle()


def test_more_launchers_join_and_a_preempted_one_comes_back(slurm: Cluster, training: Training) -> None:
    token = training.folder / "token"
    token.touch(0o600)
    token.write_text("a" * 64)
    with slurm.started(
        [sys.executable, "-m", "paceline", "coordinator", "--listen", f"{slurm.login.address}:7400",
         "--token-file", str(token)]
    ):  # fmt: skip
        environment = training.environment(
            PACELINE_COORDINATOR=f"{slurm.login.address}:7400", PACELINE_TOKEN_FILE=str(token)
        )
        more = (
            "--cpus-per-task=1", "--exclusive", "--time=5", f"--output={training.folder}/%A_%a.out",
            str(SCRIPTS / "workers.sbatch"), str(training.script), str(training.folder), "100000",
        )  # fmt: skip
        array = slurm.submit("--array=0-1", *more, **environment)
        training.wait("two train", lambda lines: len(workers_of(lines)) == 2)
        single = slurm.submit(*more, **environment)
        training.wait("another sbatch joins", lambda lines: len(workers_of(lines)) == 3)
        urgent = training.folder / "urgent.sbatch"
        urgent.write_text("#!/bin/bash\ntrue\n")
        asked_at = time.time()
        slurm.submit("--partition=high", "--nodes=1", "--exclusive", "--output=/dev/null", urgent)
        training.wait("a fourth process", lambda lines: len(workers_of(lines)) == 4)
        lines = training.lines()
        seen = {worker: [line.at for line in lines if line.worker == worker] for worker in workers_of(lines)}
        print(
            f"\npreempted: left {min(map(max, seen.values())) - asked_at:.2f} s after the other job was submitted, "
            f"back after {max(map(min, seen.values())) - asked_at:.1f} s, "
            f"longest gap {longest_gap(lines, asked_at, time.time()):.2f} s"
        )
        back = max(line.step for line in training.lines())
        training.wait("all train on", lambda lines: max(line.step for line in lines) > back + 10)
        slurm.run(sys.executable, "-m", "paceline", "drain", "training", "--all", **environment)
        for each in (array, single):
            slurm.wait_for_state(each, "COMPLETED")
    training.check_samples(max(line.step for line in training.lines()))
    assert "stopping 1 worker" in training.outputs()
    slurm.wait_until_idle()


def test_a_job_drains_before_its_time_limit_and_resumes_when_requeued(slurm: Cluster, training: Training) -> None:
    job = slurm.submit(
        "--nodes=2", "--cpus-per-task=1", "--time=1", f"--output={training.folder}/%j.out",
        SCRIPTS / "train.sbatch", str(training.script), str(training.folder), "200",
        **training.environment(PACELINE_DRAIN_BEFORE="40", STEP_S="0.1"),
    )  # fmt: skip
    ended = slurm.wait_for_state(job, "COMPLETED", "FAILED", timeout=90)
    assert ended["JobState"] == "COMPLETED", training.outputs()
    assert int(ended["Restarts"]) >= 1, training.outputs()
    assert "the time of the Slurm job ends in 40 s" in training.outputs()
    training.check_samples(200)
    slurm.wait_until_idle()


def test_scancel_drains_and_does_not_requeue(slurm: Cluster, training: Training) -> None:
    job = slurm.submit(
        "--nodes=2", "--cpus-per-task=1", "--time=5", f"--output={training.folder}/%j.out",
        SCRIPTS / "train.sbatch", str(training.script), str(training.folder), "100000",
        **training.environment(),
    )  # fmt: skip
    training.wait("two train", lambda lines: len(workers_of(lines)) == 2)
    slurm.run("scancel", job)
    slurm.wait_for_state(job, "CANCELLED")
    slurm.wait_until_idle()
    lines = training.lines()
    assert len(list((training.folder / "runs").glob("*"))) >= 1, training.outputs()
    training.check_samples(max(line.step for line in lines))
