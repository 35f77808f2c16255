"""TRL's SFTTrainer with an adapter of peft becomes elastic by a class of both."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support.command import Command, command, script

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.newest,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

TUNE = Path(__file__).with_name("tune_sft.py")


def losses(run: Command) -> list[list[float]]:
    assert run.wait(200.0) == 0, str(run)
    return sorted(json.loads(line) for line in re.findall(r"loss (\[.*\])", run.stdout))


def test_an_adapter_trains_with_sft_trainer_through_a_kill(tmp_path: Path) -> None:
    told = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PACELINE_FAILURE_TIMEOUT": "20"}
    for name in ("host", "elastic"):
        (tmp_path / name).mkdir()
    with script(TUNE, HOST="1", FOLDER=str(tmp_path / "host"), **told) as run:
        expected = losses(run)
    bounds = ("-n", "2", "--restarts", "1")
    with command("run", *bounds, str(TUNE), FOLDER=str(tmp_path / "elastic"), **told) as run:
        found = losses(run)
    assert (tmp_path / "elastic" / "struck").exists(), str(run)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-5)
    assert (tmp_path / "elastic" / "adapter" / "checkpoint-6" / "adapter_model.safetensors").exists()
