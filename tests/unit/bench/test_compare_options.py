"""What the command line of `compare.py` asks for, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import compare
import peers
from conductor import paceline_recipe
from jobs import COLLECTIVES, Job, plan
from paceline._base.terminal import UsageError
from peers import check_peer, mpirun_command, peer_recipe

app = typer.Typer()
app.command()(compare.main)
runner = CliRunner()


def test_plan_makes_a_job_for_each_size_rounded_to_the_world() -> None:
    assert plan("all-gather", 3, "4,1KiB") == [Job("all_gather", 12), Job("all_gather", 1032)]
    assert plan("barrier", 3, "4,1KiB") == [Job("barrier", 0)]


def test_plan_for_all_makes_a_job_for_every_collective() -> None:
    jobs = plan("all", 2, "1KiB")
    assert [job.collective for job in jobs] == [name.replace("-", "_") for name in COLLECTIVES]
    assert [job.bytes for job in jobs] == [1024] * (len(jobs) - 1) + [0]


def test_plan_keeps_schedules_in_order_without_duplicates() -> None:
    assert plan("all-reduce", 2, "4", "ring, star,ring") == [Job("all_reduce", 4, ("ring", "star"))]


def test_each_job_has_the_place_of_its_result() -> None:
    assert {job.place for job in plan("all-reduce", 2, "4,8")} == {"usual"}
    assert [job.place for job in plan("all-reduce", 2, "4,8", place="out")] == ["out", "out"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-to-none"], "choose one of all-reduce, reduce, reduce-scatter, broadcast, scatter, all-gather, gather"),
        (
            ["all-reduce", "--links", "grpc,rdma"],
            "there is no kind of link 'rdma': choose from shm, tcp, grpc, local",
        ),
        (["all-reduce", "--links", ""], "there is no kind of link ''"),
        (["all-reduce", "--vs", "nccl"], "there is no 'nccl' to compare with: choose from gloo, openmpi"),
        (["all-reduce", "--memory", "mine"], "--memory must be one of any, group, not 'mine'"),
        (["all-reduce", "--place", "elsewhere"], "--place must be one of usual, in, out, not 'elsewhere'"),
        (["all-reduce", "--plot", "picture.gif"], "--plot writes .png, .svg or .pdf, not picture.gif"),
        (["all-reduce", "--plot", "/no/such/folder/a.png"], "there is no folder /no/such/folder for --plot"),
        (["all", "--sizes", "3MiBs"], "is not a size"),
        (["all", "--sizes", "4", "--schedule", "ring"], "--schedule needs one collective"),
        (["send-recv", "--schedule", "ring"], "send-recv has no schedules"),
        (
            ["all-gather", "--schedule", "ring,star"],
            "no schedule 'star' for all_gather; the schedules are direct, bruck, ring",
        ),
        (
            ["all-reduce", "--schedule", ""],
            "there is no schedule '' for all_reduce; the schedules are star, direct, ring",
        ),
    ],
)
def test_invalid_arguments_print_one_line_and_exit_with_code_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plot.find_spec", lambda name: object())  # as if there were all extras
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vs", "gloo"], "pip install torch"),
        (["--vs", "openmpi"], "pip install mpi4py"),
        (["--plot", "a.png"], "pip install matplotlib"),
    ],
)
def test_a_missing_package_is_named_with_its_install_command(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("plot", "peers"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    result = runner.invoke(app, ["all-reduce", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_mpirun_of_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho HYDRA build details\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("peers.find_spec", lambda name: object())
    with pytest.raises(UsageError, match="apt-get install openmpi-bin"):
        check_peer("openmpi")


def test_mpirun_command_has_oversubscribe_binding_and_root_options() -> None:
    command = mpirun_command("/s", 4, 17, root=True)
    assert command[:5] == ["mpirun", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]
    assert command[5:7] == ["-n", "4"]
    assert command[-4:] == [peers.__file__, "/s", "openmpi-rank", "4"]
    assert "--allow-run-as-root" not in mpirun_command("/s", 4, 17, root=False)


def test_contenders_do_not_inherit_the_coordinator_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_COORDINATOR", "there:1")
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    recipe = paceline_recipe("shm", 2, "any")
    assert "PACELINE_COORDINATOR" not in recipe.environment
    assert recipe.environment["PACELINE_TOKEN"] == "secret"
    assert recipe.environment["PACELINE_LINKS"] == "shm,grpc"
    assert paceline_recipe("grpc", 2, "any").environment["PACELINE_LINKS"] == "grpc"
    assert peer_recipe("gloo", 2).name != peer_recipe("openmpi", 2).name
