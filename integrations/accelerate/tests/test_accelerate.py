"""A loop of accelerate's in real processes: workers die, join and leave, and nothing else differs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.command import Command, command, script

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

LOOP = Path(__file__).with_name("loop.py")
TOGETHER = ("-n", "3", "--min", "2", "--restarts", "2")


@contextmanager
def started(folder: Path, *options: str, failure_timeout: float = 20.0, **asked: Any) -> Iterator[Command]:
    """`loop.py` under `paceline run` with these options; as one process without a launcher if there are none."""
    told = {
        "ASKED": json.dumps({"folder": str(folder), **asked}),
        "OMP_NUM_THREADS": "1",  # other threads, other bits
        "PACELINE_FAILURE_TIMEOUT": str(failure_timeout),
    }
    with command("run", *options, str(LOOP), **told) if options else script(LOOP, **told) as run:
        yield run


def train(folder: Path, *options: str, **asked: Any) -> Command:
    """A run that has ended well."""
    with started(folder, *options, **asked) as run:
        assert run.wait(150.0) == 0, str(run)
    return run


def journal(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Returns what was logged, with the steps, in order."""
    return [(step, values) for step, values in map(json.loads, (folder / "journal").read_text().splitlines())]


def checkpoints(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the optimizer's averages in each checkpoint."""
    found = {}
    for path in sorted((folder / "checkpoints").iterdir()):
        state = torch.load(path / "optimizer.bin")["state"]
        found[path.name] = {f"{number}": each["exp_avg"] for number, each in state.items()}
    return found


def end(run: Command) -> str:
    """Returns the digest of the weights, on which all workers agree."""
    (said,) = set(re.findall(r"ends with (\w+)", run.stdout))
    return str(said)


def assert_close(folder: Path, expected: Path) -> None:
    """Each line is there once, and each checkpoint; their values are the same, up to rounding."""
    found, known = journal(folder), journal(expected)
    again = [each for number, each in enumerate(found) if each[0] is None and number]
    assert [(step, values.keys()) for step, values in found if step is not None] == [
        (step, values.keys()) for step, values in known if step is not None
    ]
    assert all(values == known[0][1] for _, values in again)  # the configuration, of each process that had rank 0
    for (_, one), (_, other) in zip([each for each in found if each[0]], known[1:], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert_same_checkpoints(folder, expected)


def assert_same_checkpoints(folder: Path, expected: Path) -> None:
    found, known = checkpoints(folder), checkpoints(expected)
    assert found.keys() == known.keys()
    for name, tensors in known.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(found[name][key], tensor, rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """A run with accelerate alone, and its folder."""
    folder = tmp_path_factory.mktemp("hosts")
    return train(folder, host=True), folder


@pytest.mark.newest
def test_one_worker_has_the_bits_of_accelerate(hosts: tuple[Command, Path], tmp_path: Path) -> None:
    """Losses are added up in another precision. An epoch ends with a step of one short batch."""
    assert end(train(tmp_path)) == end(hosts[0])
    assert_close(tmp_path, hosts[1])


@pytest.mark.newest
@pytest.mark.parametrize("evaluates", ["alone", "together"])
def test_rank_0_is_killed_in_an_evaluation(hosts: tuple[Command, Path], tmp_path: Path, evaluates: str) -> None:
    """The log says how many samples were evaluated, so each of them counts once."""
    train(tmp_path, *TOGETHER, workers=3, strike=["evaluation", 8, 0], pace=0.1, evaluates=evaluates)
    assert (tmp_path / "struck").exists()
    assert_close(tmp_path, hosts[1])
    assert {values["rows"] for _, values in journal(tmp_path) if "accuracy" in values} == {52}


@pytest.mark.parametrize("where", ["block", "log"])
def test_rank_0_is_killed_in_a_step_and_behind_it(hosts: tuple[Command, Path], tmp_path: Path, where: str) -> None:
    train(tmp_path, *TOGETHER, workers=3, strike=[where, 5, 0], pace=0.1)
    assert (tmp_path / "struck").exists()
    assert_close(tmp_path, hosts[1])


@pytest.mark.newest
def test_a_kill_while_rank_0_saves_a_join_and_a_drain(hosts: tuple[Command, Path], tmp_path: Path) -> None:
    with started(tmp_path, *TOGETHER, workers=3, strike=["save", 0, 0], pace=0.2) as run:
        run.wait_for("made step 17 of rank 0", timeout=100.0)
        (pid,) = re.findall(r"pid (\d+) made step 17 of rank 0", run.stdout)
        os.kill(int(pid), signal.SIGTERM)
        assert run.wait(150.0) == 0, str(run)
    assert (tmp_path / "struck").exists()
    assert_close(tmp_path, hosts[1])


@pytest.mark.newest
@pytest.mark.parametrize("step", [6, 8])
def test_a_worker_that_wakes_up_skips_what_the_others_have_done(
    hosts: tuple[Command, Path], tmp_path: Path, step: int
) -> None:
    """It stopped behind the last step of an epoch, before a log, another log and a save; or in mid epoch."""
    asked: dict[str, Any] = {"strike": ["log", step, 0], "stops": True, "pace": 0.2}
    with started(tmp_path, *TOGETHER, failure_timeout=3.0, workers=3, **asked) as run:
        run.wait_for("made step 10", timeout=100.0)
        (pid,) = re.findall(r"pid (\d+) made step 6 of rank 0", run.stdout)
        os.kill(int(pid), signal.SIGCONT)
        run.wait_for(f"pid {pid} made step", count=step + 1, timeout=100.0)
        assert run.wait(150.0) == 0, str(run)
    assert_close(tmp_path, hosts[1])


def test_training_goes_on_from_a_checkpoint_with_another_number_of_workers(tmp_path: Path) -> None:
    """The checkpoint was saved in the middle of an epoch, by accelerate alone."""
    train(tmp_path / "alone", host=True, shuffles=True, saves=11)
    checkpoint = str(tmp_path / "alone" / "checkpoints" / "checkpoint_1")
    asked: dict[str, Any] = {"workers": 3, "strike": ["block", 13, 1], "pace": 0.1, "shuffles": True}
    train(tmp_path / "together", *TOGETHER, resume=[checkpoint, 11], **asked)
    assert (tmp_path / "together" / "struck").exists()
    found = [each for each in journal(tmp_path / "together") if each[0] is not None]
    known = [each for each in journal(tmp_path / "alone") if each[0] is not None and each[0] > 11]
    assert [step for step, _ in found] == [step for step, _ in known]
    for (_, one), (_, other) in zip(found, known, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert [*checkpoints(tmp_path / "together")] == ["checkpoint_10", "checkpoint_11"]


@pytest.mark.newest
def test_shuffled_batches_with_fewer_rows_than_workers(tmp_path: Path) -> None:
    """Some workers have no row of a batch, and take part all the same."""
    asked: dict[str, Any] = {"rows": 2, "shuffles": True}
    train(tmp_path / "alone", host=True, **asked)
    train(tmp_path / "together", "-n", "3", workers=3, **asked)
    assert_close(tmp_path / "together", tmp_path / "alone")


def test_one_worker_that_sets_the_trigger_stops_all(tmp_path: Path) -> None:
    run = train(tmp_path, "-n", "2", workers=2, trigger=6)
    assert journal(tmp_path)[-1][0] == 6
    end(run)


def test_an_exception_names_its_line(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", workers=2, raises=100) as run:
        assert run.wait(100.0) != 0
    assert 'raise LookupError("no such point")' in run.stderr, str(run)
    assert "LookupError: no such point" in run.stderr
