"""Replicas of two ranks train as members do: one dies with its mate, comes back, and leaves as a whole."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import paceline
from support.command import command, wait_until_gone

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

SAMPLES = 24

SCRIPT = str(Path(__file__).parent / "replica_trainer.py")


def undisturbed(total: int) -> dict[str, str]:
    """Returns the digests of both halves after so many steps, computed here."""
    halves = [np.full((2, 4), 1.0 + position) for position in range(2)]
    x = np.arange(SAMPLES * 4.0).reshape(SAMPLES, 4) % 5
    with paceline.join() as session:
        state = paceline.TrainState(sampler=paceline.ElasticSampler(SAMPLES, global_batch=6))
        for step in session.steps(state, total=total):
            with step:
                batch = x[step.indices]
                both = sum((batch @ half.T).sum(1) % 7 for half in halves)
                gradient = np.tile(((both + step.number) % 3 - 1) @ batch, (2, 1))
                halves = [half - gradient for half in halves]
    return {str(p): hashlib.sha256(half.tobytes()).hexdigest()[:16] for p, half in enumerate(halves)}


def train(tmp_path: Path, total: int, *struck: object, then: str = "on") -> tuple[str, str]:
    """Runs three replicas of two ranks, of which two are enough; returns what their ranks and the launcher said."""
    bounds = ("-n", "6", "--replica-size", "2", "--restarts", "1", "--min", "2", "--max", "3")
    script = (SCRIPT, str(total), "0.05", *map(str, struck), then, str(tmp_path / "struck"))
    with command("run", *bounds, *script) as run:
        assert run.wait(150.0) == 0, str(run)
    wait_until_gone([int(pid) for pid in re.findall(r"pid (\d+)", run.stdout + run.complaints)])
    return run.stdout, run.complaints


def check(stdout: str, total: int, replicas: Sequence[str]) -> None:
    """Each sample was used once in each epoch; each half has the bits of an undisturbed run; these replicas ended."""
    expected = undisturbed(total)
    found = re.findall(r"rank (\d) of (\d/\d): (\w+) \[(.*)\]", stdout)
    assert {(often, bits == expected[rank]) for rank, _, bits, often in found} == {(str(total // 4), True)}, stdout
    assert sorted((replica, rank) for rank, replica, _, _ in found) == [
        (replica, rank) for replica in replicas for rank in "01"
    ], stdout


@pytest.mark.newest
def test_replicas_train_undisturbed(tmp_path: Path) -> None:
    stdout, _ = train(tmp_path, 40, "never", 0, 0)
    check(stdout, 40, ["0/3", "1/3", "2/3"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instant", "position"),
    [
        pytest.param("begins", 0, marks=pytest.mark.exhaustive),
        pytest.param("inside", 1, marks=pytest.mark.exhaustive),
        pytest.param("between sums", 0, marks=pytest.mark.exhaustive),
        ("before the gate", 1),
        pytest.param("behind the gate", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_the_other_replicas_go_on_when_a_rank_is_killed_and_its_mate_ends_too(
    instant: str, position: int, tmp_path: Path
) -> None:
    stdout, complaints = train(tmp_path, 40, instant, position, 4)
    (told,) = re.findall(r"restarting replica (\d) \(rank (\d), pid \d+ was killed by SIGKILL\) as a whole", complaints)
    assert told[1] == str(position), complaints
    check(stdout, 40, ["0/2", "1/2"])


@pytest.mark.slow
def test_a_replica_that_comes_back_takes_the_state_position_by_position(tmp_path: Path) -> None:
    stdout, complaints = train(tmp_path, 60, "inside", 0, 4, then="back")
    assert complaints.count("as a whole") == 1
    check(stdout, 60, ["0/3", "1/3", "2/3"])


@pytest.mark.slow
def test_a_replica_leaves_when_one_of_its_ranks_gets_sigterm(tmp_path: Path) -> None:
    stdout, complaints = train(tmp_path, 40, "leaves", 1, 4)
    assert "restarting" not in complaints
    check(stdout, 40, ["0/2", "1/2"])
