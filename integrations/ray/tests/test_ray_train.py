"""`PacelineConfig` with Ray's `TorchTrainer` on a real cluster of three raylets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from paceline.errors import StepOrderError
from paceline_ray import PacelineConfig, report
from paceline_ray._reports import Report, ReportDesk, Reporter
from paceline_ray._train import _PacelineBackend, _WithoutBarriers
from support import ray_train_loop
from support.blocks import ROOT, blocks
from support.ray_cluster import RayNodes
from support.ray_train_loop import EVERY, Heard, alone, broken, dies_as_a_whole, loses_a_third, loses_workers

pytestmark = [
    pytest.mark.needs(what="ray"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # Ray Data, of its own settings
]


@pytest.fixture
def fit(nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains with workers on a node each, and polls them ten times as often as Ray does."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)

    def run(
        train: Callable[[Mapping[str, str]], Any], max_failures: int, heard: Heard | None = None, workers: int = 3
    ) -> Any:
        while len(nodes.others) < workers - 1:
            nodes.add()
        return TorchTrainer(
            train,
            train_loop_config={"folder": str(tmp_path)},
            torch_config=PacelineConfig(min=1),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                name="run",
                storage_path=str(tmp_path / "stored"),
                failure_config=FailureConfig(max_failures=max_failures),
                callbacks=[] if heard is None else [heard],
            ),
        ).fit()

    return run


def test_the_others_train_on_while_workers_die_and_are_replaced(fit: Callable[..., Any], tmp_path: Path) -> None:
    """Losses and weights are those of one process without Paceline, and each step is reported once."""
    heard = Heard(tmp_path)
    result = fit(loses_workers, 5, heard)
    told = heard.read()
    assert [each["step"] for each in told] == list(range(1, told[-1]["step"] + 1))
    assert [each["step"] for each in told if each["checkpoint"]] == list(range(EVERY, len(told) + 1, EVERY))
    for each, (loss, weights) in zip(told, alone(len(told)), strict=True):
        assert each["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6), each
        if each["checkpoint"]:
            saved = torch.load(f"{each['checkpoint']}/weights.pt")
            assert all(torch.allclose(saved[name], weights[name], atol=1e-5) for name in weights), each
    survivor = int((tmp_path / "survivor").read_text())
    assert told[EVERY - 1]["pid"] == survivor, "it reported the step in which rank 0 died"
    assert told[-1]["pid"] == survivor, "it was never restarted"
    assert result.metrics["step"] == len(told) // EVERY * EVERY, "Ray's result has the last checkpoint"


def test_a_worker_dies_while_ray_replaces_two_others(fit: Callable[..., Any], tmp_path: Path) -> None:
    fit(loses_a_third, 5, workers=4)
    assert (tmp_path / "ended").read_text() == (tmp_path / "survivor").read_text()


def test_workers_that_all_die_continue_from_the_checkpoint(fit: Callable[..., Any], tmp_path: Path) -> None:
    heard = Heard(tmp_path)
    fit(dies_as_a_whole, 3, heard)
    told = heard.read()
    assert [each["step"] for each in told] == list(range(1, 21)), "steps 11 to 13 are done twice and reported once"
    assert [each["loss"] for each in told] == pytest.approx([loss for loss, _ in alone(20)], rel=1e-4, abs=1e-6)
    assert told[0]["pid"] != told[-1]["pid"]


def test_an_error_in_the_users_code_names_its_line(fit: Callable[..., Any]) -> None:
    file = Path(ray_train_loop.__file__)
    (line,) = [n for n, text in enumerate(file.read_text().splitlines(), 1) if text.endswith("# this line")]
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit(broken, 0)
    assert f'File "{file}", line {line}, in broken' in str(caught.value)
    assert "ValueError: the user's code failed" in str(caught.value)
    assert "use paceline_ray.report(session, step, metrics)" in str(caught.value), "ray.train.report was refused"


def test_the_script_of_the_docs_page_prints_the_shown_output(nodes: RayNodes, tmp_path: Path) -> None:
    script, shown = (block.code for block in blocks(ROOT / "docs" / "how-to" / "ray-train.md")[:2])
    (tmp_path / "classify.py").write_text(script)
    command, *expected = shown.splitlines()
    assert command == "$ python classify.py"
    done = subprocess.run(
        [sys.executable, "classify.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": nodes.address, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-len(expected) :] == expected, done.stdout + done.stderr


def test_the_desk_takes_each_step_once_and_in_order() -> None:
    desk = ReportDesk()
    assert desk.wants(1)
    for step in (1, 2, 2, 1, 5):
        desk.put(Report(step, {"loss": 1.0}))
    assert [each.step for each in desk.take()] == [1, 2, 5]
    assert desk.take() == []
    assert not desk.wants(5)
    assert desk.wants(6)


def test_a_second_report_of_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace(retry=lambda: [])
    step: Any = SimpleNamespace(number=7)
    with pytest.raises(RuntimeError, match=r"needs a worker of ray\.train\.torch\.TorchTrainer"):
        report(session, step, {"loss": 1.0})
    monkeypatch.setattr("paceline_ray._reports._reporter", Reporter(None, "run"))
    with pytest.raises(ValueError, match="metrics has tensors"):
        report(session, step, {"loss": torch.ones(1)})
    report(session, step, {"loss": 1.0})
    with pytest.raises(StepOrderError, match="twice behind step 7: give all metrics to one call"):
        report(session, step, {"accuracy": 1.0})


def test_functions_of_ray_train_that_would_hang_are_refused() -> None:
    train = _WithoutBarriers()
    for name in (
        "report",
        "barrier",
        "broadcast_from_rank_zero",
        "get_preemption_info",
        "get_all_reported_checkpoints",
    ):
        with pytest.raises(RuntimeError, match=r"use paceline_ray\.report\(session, step, metrics\)"):
            getattr(train, name)()


@pytest.mark.parametrize("least", [0, 3])
def test_a_minimum_that_the_group_cannot_have_is_refused(least: int) -> None:
    with pytest.raises(ValueError, match=rf"must be 1 to num_workers \(2\), not {least}"):
        _PacelineBackend().on_start([None, None], PacelineConfig(min=least))


def test_nothing_of_ray_or_torch_is_imported_before_it_is_used() -> None:
    code = "import sys, paceline_ray; print({'ray', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
