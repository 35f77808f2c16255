"""`paceline replay`: one worker computes the steps of a run that lost a worker, and finds whatever was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from paceline import checkpoint
from support.command import command

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import paceline
from paceline import nn

SEED = 0
Path(f"began-{os.getpid()}").touch()
while len(list(Path().glob("began-*"))) < 3:
    time.sleep(0.01)  # the first generation has all three
with paceline.join() as session:
    model = nn.Linear(4, 2, rng=np.random.default_rng(1))
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.Adam(model, lr=0.1)
    x = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    t = (x.sum(axis=1) > 0).astype(np.int64)
    sampler = paceline.ElasticSampler(len(x), global_batch=32, microbatches=8)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(state, total=24, seed=SEED, checkpoint_dir="runs", checkpoint_every=8,
                              receipts="runs/receipts.jsonl", receipts_every=3):
        with step:
            optimizer.zero_grad()
            for micro in step.microbatches:
                with micro:
                    noise = micro.rng.normal(size=(len(micro.indices), 4)).astype(np.float32)
                    loss, dy = nn.softmax_cross_entropy(ddp(x[micro.indices] + noise), t[micro.indices])
                    ddp.backward(dy)
            for thread in threading.enumerate():
                if thread.name == "paceline-checkpoint":
                    thread.join()  # otherwise the next one is left out if this one takes longer than eight steps
            if session.size == 3 and session.rank == 0 and step.number == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
    Path("the-end").touch()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on three workers, whose rank 0 was killed in step 13."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "train.py").write_text(SCRIPT)
    with chdir(folder), command("run", "-n", "3", "--min", "2", "train.py") as run:
        run.wait()
    assert "killed by SIGKILL" in run.stderr, str(run)
    lines = [json.loads(line) for line in (folder / "runs" / "receipts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 8, 9, 12, 15, 16, 18, 21, 24], str(run)
    return folder


@pytest.fixture
def folder(ran: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(ran, tmp_path / "copy")
    (tmp_path / "copy" / "the-end").unlink()
    yield tmp_path / "copy"
    assert not (tmp_path / "copy" / "the-end").exists(), "the script went on behind its loop"


def replay(folder: Path, step: int) -> tuple[int, str]:
    code, said, _ = run_replay(folder, step)
    return code, said


def replay_with_json(folder: Path, step: int) -> tuple[int, str, dict[str, Any]]:
    code, said, printed = run_replay(folder, step, "--json")
    return code, said, json.loads(printed.splitlines()[-1])


def run_replay(folder: Path, step: int, *options: str) -> tuple[int, str, str]:
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")}
    with chdir(folder), command("replay", *options, "--step", str(step), "--checkpoint", "runs", "train.py") as run:
        code = run.wait()
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")} == before, "a file was written"
    return code, run.stderr, run.stdout


def test_one_worker_replays_the_steps_of_three(folder: Path) -> None:
    code, said = replay(folder, 24)
    assert (code, "step 24 holds: computed again from the checkpoint of step 16, 4 receipts" in said) == (0, True), said
    code, said = replay(folder, 15)
    assert (code, "step 15 holds: computed again from the start of the script, 6 receipts" in said) == (0, True), said
    assert replay(folder, 14)[0] == 2


def test_a_changed_weight_in_a_checkpoint_is_detected(folder: Path) -> None:
    (tag,) = [tag for tag in checkpoint.tags(folder / "runs") if tag.step == 16]
    found = checkpoint.load(folder / "runs", tag)
    assert found is not None
    arrays = found.state["parts"]["model"]["arrays"]
    next(iter(arrays.values())).reshape(-1)[0] += 1e-6
    shutil.rmtree(found.folder)
    checkpoint.save(folder / "runs", found.state, tag, keep=9)
    code, said = replay(folder, 24)
    assert code == 1
    assert f"the checkpoint {found.folder} has the digest " in said, said


def test_a_changed_weight_in_a_step_is_detected(folder: Path) -> None:
    spoiled = "optimizer.step()\n            model.weight.data[0, 0] += 1e-6 * (step.number == 20)"
    changed = SCRIPT.replace("optimizer.step()", spoiled)
    (folder / "train.py").write_text(changed)
    code, said = replay(folder, 24)
    assert code == 1
    assert "the state after step 21 has the digest " in said, said
    assert "the script is " in said


def test_a_different_seed_is_reported(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("SEED = 0", "SEED = 1"))
    code, said = replay(folder, 24)
    assert code == 1
    assert "seed is 1 here but 0 there" in said, said


def test_a_changed_receipt_is_reported(folder: Path) -> None:
    path = folder / "runs" / "receipts.jsonl"
    path.write_text(path.read_text().replace('"step":18,', '"step":17,'))
    code, said = replay(folder, 24)
    assert code == 1
    assert "line 8: the receipt of step 17 was changed" in said, said


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "raise SystemExit(2)", "raise ValueError"])
def test_a_script_that_ends_before_the_step_is_reported(folder: Path, end: str) -> None:
    (folder / "train.py").write_text(end)
    code, said, result = replay_with_json(folder, 24)
    assert code == 3
    assert "the script has ended before step 24" in said, said
    assert (result["step"], result["holds"]) == (24, None)
    assert "the script has ended before step 24" in result["error"]


def test_a_step_after_a_gap_in_the_receipts_can_be_replayed(folder: Path) -> None:
    path = folder / "runs" / "receipts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"step":9,' not in line))
    code, said, result = replay_with_json(folder, 24)
    assert (code, "The chain begins at step 12" in said) == (0, True), said
    assert (result["holds"], result["held"]) == (True, [16, 18, 21, 24])
    assert "The chain begins at step 12" in result["gap"]
    code, said = replay(folder, 8)
    assert (code, "step 8 has no receipt" in said, "The chain begins at step 12" in said) == (2, True, True), said
