"""`ElasticTrainer` in real processes: workers die, join and leave, and everything is as in an undisturbed run."""

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

from support.command import Command, command, script

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.newest,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

TUNE = Path(__file__).with_name("tune.py")
TOGETHER = ("-n", "3", "--min", "2", "--restarts", "2")
SAVED = {"struck", "checkpoint-4", "checkpoint-8", "checkpoint-12"}
BEST = {"metric_for_best_model": "loss", "load_best_model_at_end": True}


def environment(folder: Path, arguments: dict[str, Any], **asked: Any) -> dict[str, str]:
    told = json.dumps({**asked, "arguments": {"output_dir": str(folder), **arguments}})
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }  # other threads, other bits
    return {**quiet, "PACELINE_FAILURE_TIMEOUT": "20", "ASKED": told}


@contextmanager
def started(folder: Path, *options: str, arguments: dict[str, Any] | None = None, **asked: Any) -> Iterator[Command]:
    """`tune.py` under `paceline run` with these options; as one process without a launcher if there are none."""
    told = environment(folder, arguments or {}, **asked)
    with command("run", *options, str(TUNE), **told) if options else script(TUNE, **told) as run:
        yield run


def train(folder: Path, *options: str, **asked: Any) -> Command:
    """A run that has ended well."""
    with started(folder, *options, **asked) as run:
        assert run.wait(240.0) == 0, str(run)
    return run


def logs(run: Command) -> list[dict[str, Any]]:
    """Returns the lines of the log in the order of steps, and checks that no line came twice."""
    found = [json.loads(line) for line in re.findall(r"logs (\{.*\})", run.stdout)]
    kinds = [(each["step"], "eval_loss" in each) for each in found]
    assert len(set(kinds)) == len(kinds), str(run)
    return sorted(found, key=lambda each: (each["step"], "eval_loss" in each))


def end(run: Command) -> str:
    """Returns the last step, the digest of the weights and the length of the history, on which all workers agree."""
    (said,) = set(re.findall(r"ends at (step .*)", run.stdout))
    return str(said)


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("here-")}


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    for one, other in zip(found, expected, strict=True):
        for name in one.keys() - {"step"}:
            assert float.fromhex(one[name]) == pytest.approx(float.fromhex(other[name]), rel=1e-5), (one, other)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run with transformers' own Trainer."""
    return train(tmp_path_factory.mktemp("hosts"), host=True)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """One worker that trains in microbatches, and its folder."""
    folder = tmp_path_factory.mktemp("quiet")
    return train(folder, bits=True, dropout=0.1), folder


def test_one_worker_has_the_bits_of_transformers_trainer(hosts: Command, tmp_path: Path) -> None:
    alone = train(tmp_path)
    assert logs(alone) == logs(hosts)
    assert end(alone) == end(hosts)


def test_a_worker_that_is_killed_in_an_evaluation_changes_nothing_but_rounding(hosts: Command, tmp_path: Path) -> None:
    """The learning rate is low enough for differences of rounding to stay small."""
    run = train(tmp_path, *TOGETHER, workers=3, strike=["evaluation", 4, 0], pace=0.2)
    assert (tmp_path / "struck").exists()
    assert_close(logs(run), logs(hosts))
    assert {float.fromhex(each["eval_rows"]) for each in logs(run) if "eval_rows" in each} == {100.0}
    assert written(tmp_path) == SAVED


def test_kills_a_join_and_a_drain_keep_the_bits(quiet: tuple[Command, Path], tmp_path: Path) -> None:
    """Rank 0 is killed when it has saved a checkpoint, and is replaced; then another worker has to leave."""
    with started(tmp_path, *TOGETHER, bits=True, dropout=0.1, workers=3, strike=["save", 4, 0], pace=0.7) as run:
        run.wait_for("made step 6", timeout=120.0)
        pid = re.findall(r"pid (\d+) made step 6", run.stdout)[-1]
        os.kill(int(pid), signal.SIGTERM)
        assert run.wait(240.0) == 0, str(run)
    assert (tmp_path / "struck").exists()
    assert logs(run) == logs(quiet[0])
    assert end(run) == end(quiet[0])
    assert written(tmp_path) == SAVED


def test_training_goes_on_from_a_checkpoint_with_another_number_of_workers(
    quiet: tuple[Command, Path], tmp_path: Path
) -> None:
    """Rank 2 dies when the others know what their samples count, and before they have kept a sum."""
    before, folder = quiet
    (tmp_path / "checkpoint-4").symlink_to(folder / "checkpoint-4")
    run = train(tmp_path, *TOGETHER, bits=True, dropout=0.1, resume=True, workers=3, strike=["begin", 0, 2], pace=0.5)
    assert (tmp_path / "struck").exists()
    assert logs(run) == [each for each in logs(before) if each["step"] > 4]
    assert end(run) == end(before)


@pytest.mark.exhaustive  # with the newest release always
def test_a_model_that_ignores_the_number_of_items_has_the_losses_of_the_trainer(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", host=True, ignores=True)
    assert_close(logs(train(tmp_path / "together", "-n", "2", ignores=True)), logs(alone))


@pytest.mark.exhaustive  # with the newest release always
def test_workers_stop_early_together_and_load_the_best_model(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", host=True, stops=True, arguments=BEST)
    run = train(tmp_path / "together", "-n", "2", stops=True, arguments=BEST)
    assert_close(logs(run), logs(alone))
    assert end(run).split()[:2] == end(alone).split()[:2] == ["step", "8"]


@pytest.mark.exhaustive  # with the newest release always
def test_an_exception_in_the_dataset_ends_all_workers_and_names_the_line(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", raises=100) as run:
        assert run.wait(120.0) == 1, str(run)
    assert 'raise LookupError("no such text")' in run.stderr, str(run)
