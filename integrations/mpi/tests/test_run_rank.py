"""`paceline run-rank` and `paceline run --engine mpi`, up to the point where MPI begins."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.engines._catalogue import make_engine
from paceline.errors import LinkUnavailable
from paceline_mpi import load_mpi
from paceline_mpi._mpirun import mpirun_arguments
from paceline_mpi._run_rank import rank_environment

runner = CliRunner()


@pytest.fixture
def no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    load_mpi.cache_clear()


@pytest.mark.usefixtures("no_mpi4py")
def test_the_engine_says_to_install_mpi4py_if_missing() -> None:
    with pytest.raises(LinkUnavailable, match=r"'mpi' cannot be used, because .*mpi4py.*: install mpi4py"):
        make_engine("mpi")


@pytest.mark.usefixtures("no_mpi4py")
def test_run_rank_says_to_install_mpi4py_if_missing() -> None:
    result = runner.invoke(app, ["run-rank", __file__])
    assert result.exit_code == 2
    assert "install mpi4py (pip install mpi4py), and an MPI library" in " ".join(result.stderr.split())


def test_a_fixed_world_takes_its_ranks_from_mpi() -> None:
    found = rank_environment("h:1", None, "digits", 2, (4, 4), ends=False)
    assert found == {
        "PACELINE_COORDINATOR": "h:1",
        "PACELINE_JOB": "digits",
        "PACELINE_RANK": "2",
        "PACELINE_WORLD_SIZE": "4",
    }


def test_an_elastic_world_gets_worker_bounds_instead_of_ranks() -> None:
    found = rank_environment("h:1", "secret", "digits", 2, (2, 4), ends=True)
    assert found == {
        "PACELINE_COORDINATOR": "h:1",
        "PACELINE_JOB": "digits",
        "PACELINE_MIN_WORKERS": "2",
        "PACELINE_MAX_WORKERS": "4",
        "PACELINE_COORDINATOR_ENDS": "1",
        "PACELINE_TOKEN": "secret",
    }


def test_the_command_line_of_mpirun() -> None:
    options = ["mpirun", "--oversubscribe", "--bind-to", "none"]
    rank = [sys.executable, "-m", "paceline", "run-rank"]
    whole = mpirun_arguments(["train.py", "--lr", "1"], workers=4, minimum=None)
    assert whole == [*options, "-n", "4", *rank, "train.py", "--lr", "1"]
    fewer = mpirun_arguments(["-m", "train"], workers=4, minimum=2)
    assert fewer == [*options, "--with-ft", "ulfm", "-n", "4", *rank, "--min", "2", "-m", "train"]


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `paceline run` would have become."""
    found: list[Any] = []

    def become(path: str, arguments: list[str]) -> None:
        found.append((path, arguments, os.environ["PACELINE_JOB"], os.environ.get("PACELINE_COORDINATOR")))
        raise SystemExit(0)

    for name in ("PACELINE_JOB", "PACELINE_COORDINATOR"):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.execv", become)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("paceline_mpi._mpirun.find_spec", lambda name: True)
    return found


def test_paceline_run_becomes_mpirun(became: list[Any]) -> None:
    arguments = ["run", "--engine", "mpi", "-n", "3", "--job", "digits", "--coordinator", "h:1", __file__, "--lr", "1"]
    assert runner.invoke(app, arguments).exit_code == 0
    whole = mpirun_arguments([__file__, "--lr", "1"], workers=3, minimum=None)
    assert became == [("/bin/mpirun", whole, "digits", "h:1")]


@pytest.mark.parametrize("option", [["--restarts", "1"], ["--log-dir", "logs"], ["--tee", "3"], ["--no-python"]])
def test_options_that_mpirun_does_not_support_are_refused(option: list[str], became: list[Any]) -> None:
    result = runner.invoke(app, ["run", "--engine", "mpi", *option, __file__])
    assert result.exit_code == 2
    assert f"{option[0]} does not go with --engine mpi" in result.stderr
    assert not became


def test_paceline_run_says_to_install_mpi4py_if_missing(became: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_mpi._mpirun.find_spec", lambda name: None)
    result = runner.invoke(app, ["run", "--engine", "mpi", __file__])
    assert result.exit_code == 2
    assert "pip install mpi4py" in result.stderr
    assert not became


def test_paceline_run_says_to_install_mpirun_if_missing(became: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    result = runner.invoke(app, ["run", "--engine", "mpi", __file__])
    assert result.exit_code == 2
    assert "apt-get install openmpi-bin" in " ".join(result.stderr.split())
