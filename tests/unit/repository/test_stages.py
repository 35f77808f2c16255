"""The stages of the tests: which files and marks each gives to pytest."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stages
from support.needs import NEEDS

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


@pytest.mark.parametrize("name", stages.STAGES)
def test_a_stage_has_marks_and_files_that_exist(name: str) -> None:
    known = {re.split(r"[:(]", mark)[0] for mark in SETTINGS["markers"]}
    for command in stages.commands(stages.STAGES[name]):
        expression, files = command[2], [word for word in command[3:] if "/" in word]
        needs = set(re.findall(r"needs\(what='(\w+)'\)", expression))
        assert needs <= set(NEEDS)
        assert set(re.findall(r"\w+", expression)) - {"and", "not", "what"} - needs <= known
        assert all((ROOT / file).exists() for file in files)
        assert files or not (stages.STAGES[name].named or stages.STAGES[name].folders)


def test_tests_marked_alone_run_after_the_others_and_one_by_one() -> None:
    together, alone = stages.commands(stages.STAGES["slow"])
    assert together[2].endswith(" and not alone")
    assert "-n" in together
    assert alone[2].endswith(" and alone")
    assert "-n" not in alone


def test_a_failure_among_the_first_does_not_hide_those_that_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"first": 1, "second": 5, "third": 0}
    ran: list[str] = []

    def run(command: list[str], env: object) -> subprocess.CompletedProcess[str]:
        ran.extend(command)
        return subprocess.CompletedProcess(command, codes[command[0]])

    monkeypatch.setattr(stages, "commands", lambda stage: [[name] for name in codes])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["stages.py", "fast"])
    assert stages.main() == 1
    assert ran == ["first", "second", "third"]


def test_marks_that_select_files_are_required_in_these_files() -> None:
    assert {stage.named for stage in stages.STAGES.values()} - {""} <= {"alone", "slow", *NEEDS}


def test_each_need_has_a_stage() -> None:
    expressions = " ".join(stage.marks for stage in stages.STAGES.values())
    assert all(f"needs(what='{need}')" in expressions for need in NEEDS)


def test_only_stages_that_name_the_pytorch_folder_run_its_tests() -> None:
    assert not [word for word in stages.commands(stages.STAGES["slow"])[0] if word.startswith("tests/pytorch")]
    assert "tests/pytorch" in stages.commands(stages.STAGES["torch"])[0]
    assert [word for word in stages.commands(stages.STAGES["torch"])[1] if word.startswith("tests/pytorch/test_")]


def test_the_makefile_runs_stages_that_exist() -> None:
    text = (ROOT / "Makefile").read_text() + (ROOT / ".ci" / "run").read_text()
    named = set(re.findall(r"\btest-(?!root\b)([a-z-]+)", text))
    assert named <= set(stages.STAGES)
