"""`Trainer(strategy="paceline")` in real processes: workers die, join and leave, and nothing else differs."""

from __future__ import annotations

import csv
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

from support.command import Command, command, script

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.newest,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

ALWAYS_WITH_THE_NEWEST = pytest.mark.exhaustive
"""With the oldest release by hand only: a worker takes seconds to import Lightning."""

FIT = Path(__file__).with_name("fit.py")
TOGETHER = ("-n", "3", "--min", "2", "--restarts", "2")


@contextmanager
def started(folder: Path, *options: str, **asked: Any) -> Iterator[Command]:
    """`fit.py` under `paceline run` with these options; as one process without a launcher if there are none."""
    told = {
        "ASKED": json.dumps({"folder": str(folder), **asked}),
        "OMP_NUM_THREADS": "1",  # other threads, other bits
        "PACELINE_FAILURE_TIMEOUT": "20",
    }
    with command("run", *options, str(FIT), **told) if options else script(FIT, **told) as run:
        yield run


def train(folder: Path, *options: str, **asked: Any) -> Command:
    """A run that has ended well."""
    with started(folder, *options, **asked) as run:
        assert run.wait(240.0) == 0, str(run)
    return run


def logs(folder: Path) -> list[dict[str, float]]:
    """Returns the lines of the log, in order."""
    (path,) = folder.glob("logs/run/*/metrics.csv")
    with path.open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def end(run: Command) -> str:
    """Returns the last step and the digest of the weights, on which all workers agree."""
    (said,) = set(re.findall(r"ends at (step .*)", run.stdout))
    return str(said)


def saved(folder: Path) -> dict[str, set[str]]:
    return {name: {path.name for path in (folder / name).iterdir()} for name in ("saved", "often")}


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """A run with a strategy of Lightning's own, and its folder."""
    folder = tmp_path_factory.mktemp("hosts")
    return train(folder, host=True), folder


def test_one_worker_has_the_bits_of_lightning(hosts: tuple[Command, Path], tmp_path: Path) -> None:
    alone = train(tmp_path)
    assert logs(tmp_path) == logs(hosts[1])
    assert end(alone) == end(hosts[0])
    assert saved(tmp_path) == saved(hosts[1])


def test_rank_0_is_killed_in_a_validation(hosts: tuple[Command, Path], tmp_path: Path) -> None:
    """The logs say how many samples were validated, so each of them counts once."""
    train(tmp_path, *TOGETHER, workers=3, strike=["validation", 8, 0], pace=0.1)
    assert (tmp_path / "struck").exists()
    assert_close(logs(tmp_path), logs(hosts[1]))
    assert {each["val_rows"] for each in logs(tmp_path) if "val_rows" in each} == {52.0}
    assert saved(tmp_path) == saved(hosts[1])


@ALWAYS_WITH_THE_NEWEST
def test_a_kill_while_rank_0_saves_a_join_and_a_drain(hosts: tuple[Command, Path], tmp_path: Path) -> None:
    with started(tmp_path, *TOGETHER, workers=3, strike=["save", 5, 0], pace=0.3) as run:
        run.wait_for("of step 9 with", timeout=120.0)
        pid = re.findall(r"pid (\d+) made batch \d+ of step 9", run.stdout)[-1]
        os.kill(int(pid), signal.SIGTERM)
        assert run.wait(240.0) == 0, str(run)
    assert (tmp_path / "struck").exists()
    assert_close(logs(tmp_path), logs(hosts[1]))
    assert saved(tmp_path) == saved(hosts[1])


def test_training_goes_on_from_a_checkpoint_with_another_number_of_workers(
    hosts: tuple[Command, Path], tmp_path: Path
) -> None:
    """From the middle of an epoch; rank 1 dies in its first step. Means over that epoch have only what came after."""
    checkpoint = str(hosts[1] / "often" / "epoch=1-step=10.ckpt")
    train(tmp_path, *TOGETHER, workers=3, strike=["batch", 10, 1], pace=0.1, resume=checkpoint)
    assert (tmp_path / "struck").exists()
    found, expected = logs(tmp_path), [each for each in logs(hosts[1]) if each["step"] >= 10]
    (mean,) = (each for each in found if each["step"] == 15 and "loss_epoch" in each)
    (whole,) = (each for each in expected if each["step"] == 15 and "loss_epoch" in each)
    assert mean.keys() == whole.keys()
    assert_close([each for each in found if each is not mean], [each for each in expected if each is not whole])


@ALWAYS_WITH_THE_NEWEST
def test_shuffled_batches_with_fewer_rows_than_workers(tmp_path: Path) -> None:
    """Some workers have no row of a batch, and take part all the same. Worker processes read the samples."""
    asked: dict[str, Any] = {"rows": 2, "shuffles": True, "fetching": 1, "trainer": {"max_epochs": 1}}
    train(tmp_path / "alone", **asked)
    train(tmp_path / "together", "-n", "3", workers=3, **asked)
    assert_close(logs(tmp_path / "together"), logs(tmp_path / "alone"))


@ALWAYS_WITH_THE_NEWEST
def test_one_worker_that_wants_to_stop_stops_all(tmp_path: Path) -> None:
    run = train(tmp_path, "-n", "2", workers=2, timer=6)
    assert end(run).startswith("step 7 of epoch 1")


@ALWAYS_WITH_THE_NEWEST
def test_an_exception_in_the_dataset_ends_all_workers_and_names_the_line(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", raises=50) as run:
        assert run.wait(120.0) == 1, str(run)
    assert 'raise LookupError("no such image")' in run.stderr, str(run)


@ALWAYS_WITH_THE_NEWEST
@pytest.mark.parametrize(
    "asked",
    [{"manual": True}, {"collects": True, "stops": True}],
    ids=["manual optimization", "outputs that the module keeps, and early stopping"],
)
def test_other_modules_and_callbacks(asked: dict[str, Any], tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", host=True, **asked)
    run = train(tmp_path / "together", *TOGETHER, workers=3, strike=["after", 6, 0], pace=0.1, **asked)
    assert (tmp_path / "together" / "struck").exists()
    assert_close(logs(tmp_path / "together"), logs(tmp_path / "alone"))
    assert end(run).split(" with ")[0] == end(alone).split(" with ")[0]
