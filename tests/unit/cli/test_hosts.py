"""What `paceline run` makes of what plug-ins tell it about its host."""

from __future__ import annotations

import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from paceline._base.terminal import UsageError
from paceline.cli import hosts
from paceline.cli.hosts import drain_at, drain_seconds, find_host, find_notices, reasons_to_leave
from paceline.launch import Host, Notice
from support.blocks import ROOT, blocks
from support.command import command

BATCH = Host("batch job", job="digits", workers=2)


def nowhere() -> Host | None:
    return None


def batch() -> Host | None:
    return BATCH


def garbled() -> Host | None:
    raise ValueError("BATCH_SLOTS must be a number, not 'many'")


def points(group: str, **functions: str) -> list[EntryPoint]:
    return [EntryPoint(name, f"{__name__}:{function}", group) for name, function in functions.items()]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that this file's functions can be named, however pytest has loaded it."""
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("sys").modules[__name__])


def test_find_host_returns_the_first_plug_in_that_reports_a_host() -> None:
    assert find_host(points("paceline.hosts", a="nowhere", b="batch")) == BATCH
    assert find_host(points("paceline.hosts", a="nowhere")) is None
    assert find_host([]) is None


def test_value_error_of_a_host_plug_in_becomes_a_usage_error() -> None:
    with pytest.raises(UsageError, match="BATCH_SLOTS must be a number"):
        find_host(points("paceline.hosts", a="garbled"))


def crashes() -> Host | None:
    raise KeyError("BATCH_SLOTS")


@pytest.mark.parametrize(("function", "words"), [("crashes", "KeyError: 'BATCH_SLOTS'"), ("gone", "has no attribute")])
def test_a_broken_host_plug_in_is_named_in_a_usage_error(function: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"the plug-in 'a' \(.*:{function}\) does not work: .*{words}"):
        find_host(points("paceline.hosts", a=function, b="batch"))


def test_find_notices_parses_provider_names_and_refuses_unknown_ones() -> None:
    assert list(find_notices("aws, gcp,azure")) == ["aws", "gcp", "azure"]
    assert find_notices(None) == {}
    with pytest.raises(UsageError, match=r"there is no provider 'ibm' .*: the providers are aws, azure, gcp"):
        find_notices("aws,ibm")


def test_value_error_of_a_notice_plug_in_becomes_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "entry_points", lambda group: points(group, moon="garbled"))
    with pytest.raises(UsageError, match=r"^BATCH_SLOTS must be a number"):
        find_notices("moon")


def test_a_notice_drains_the_workers_and_its_text_is_escaped() -> None:
    told: list[tuple[str, float]] = []
    (source,) = reasons_to_leave(None, 60.0, {"moon": Notice(lambda: "it\x1bgoes", leave_s=7.0)}, print)
    source(lambda why, seconds: told.append((why, seconds)), threading.Event())
    assert told == [("it\\x1bgoes", 7.0)]


def test_the_end_of_the_batch_job_drains_the_workers() -> None:
    told: list[tuple[str, float]] = []
    hosts._leave_at(0.0, 60.0, "batch job", lambda why, seconds: told.append((why, seconds)), threading.Event())
    assert told == [("the time of the batch job ends in 60 s", 50.0)]


def test_only_a_host_with_an_end_time_gives_a_reason_to_leave() -> None:
    end = time.time() + 3600.0
    assert len(reasons_to_leave(Host("batch job", ends_at=end), 60.0, {}, print)) == 1
    assert not reasons_to_leave(Host("batch job", ends_at=end), 0.0, {}, print)
    assert not reasons_to_leave(Host("batch job"), 60.0, {}, print)


@pytest.mark.parametrize(
    ("error", "shown"), [(OSError("no route"), "no route"), (KeyError("moon"), "KeyError('moon')")], ids=["away", "bug"]
)
def test_a_failing_notice_service_is_reported_once_and_asked_again(error: Exception, shown: str) -> None:
    answers: list[str | Exception] = [error, ValueError("no JSON"), "", "it goes"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    said: list[str] = []
    told: list[tuple[str, float]] = []
    (source,) = reasons_to_leave(None, 60.0, {"moon": Notice(ask, leave_s=7.0)}, said.append, ask_s=0.0)
    source(lambda why, seconds: told.append((why, seconds)), threading.Event())
    assert said == [f"--notice moon: {shown}; this launcher keeps asking"]
    assert told == [("it goes", 7.0)]


def test_notice_source_does_not_drain_after_the_workers_have_ended() -> None:
    ended = threading.Event()
    ended.set()
    (source,) = reasons_to_leave(None, 0.0, {"moon": Notice(lambda: "it goes", leave_s=7.0)}, print)
    source(lambda why, seconds: pytest.fail("drained"), ended)


def test_drain_at_lies_before_the_end_unless_the_job_is_shorter() -> None:
    assert drain_at(100.0, 1000.0, 60.0) == 940.0
    assert drain_at(100.0, 159.0, 60.0) is None, "it would never train"
    assert drain_at(100.0, 1000.0, 0.0) is None
    assert drain_at(100.0, None, 60.0) is None


@pytest.mark.parametrize(("before", "seconds"), [(60.0, 50.0), (3600.0, 3590.0), (20.0, 10.0), (10.0, 5.0)])
def test_drain_seconds_is_the_remaining_time_less_a_reserve(before: float, seconds: float) -> None:
    assert drain_seconds(before) == seconds


ECHO = """
import os
print(*(os.environ["PACELINE_" + name] for name in ("JOB", "MIN_WORKERS", "MAX_WORKERS")))
"""


def install(folder: Path, entry_points: str) -> None:
    """Makes the package my-batch of what lies in the folder."""
    installed = folder / "my_batch-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-batch\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def plug_in(tmp_path: Path) -> Path:
    """The plug-in of docs/how-to/own-scheduler.md, as if it were installed."""
    page = blocks(ROOT / "docs/how-to/own-scheduler.md")
    names = next(block.code for block in page if "entry-points" in block.code)
    (tmp_path / "my_batch.py").write_text(next(block.code for block in page if block.title == "my_batch.py"))
    install(tmp_path, names.replace('[project.entry-points."', "[").replace('"]', "]").replace('"', ""))
    (tmp_path / "echo.py").write_text(ECHO)
    return tmp_path


def test_a_third_party_plug_in_sets_the_default_job_and_worker_count(plug_in: Path) -> None:
    variables = {"PYTHONPATH": str(plug_in), "BATCH_JOB": "moon", "BATCH_SLOTS": "3"}
    with command("run", "--notice", "batch", str(plug_in / "echo.py"), **variables) as run:
        assert run.wait() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"[#{n}] moon 3 3" for n in range(3)]
    with command("run", "-n", "1", "--job", "mine", str(plug_in / "echo.py"), **variables) as run:
        assert run.wait() == 0, run.stderr
    assert run.stdout == "[#0] mine 1 1\n"


def test_documented_plug_in_names_the_variable_it_cannot_read(plug_in: Path) -> None:
    with command("run", str(plug_in / "echo.py"), PYTHONPATH=str(plug_in), BATCH_JOB="moon") as run:
        assert run.wait() == 2
    assert "BATCH_SLOTS must be a number, not ''" in run.stderr
    assert "does not work" not in run.stderr


BROKEN = """
[paceline.commands]
moon = my_batch:app
status = my_batch:app
[paceline.hosts]
batch = my_batch:host
[paceline.notices]
batch = my_batch:notice
[paceline.engines]
star = my_batch:Star
[paceline.engine_launchers]
star = my_batch:launch
"""


def test_plug_ins_that_cannot_be_imported_are_named_where_they_are_used(tmp_path: Path) -> None:
    (tmp_path / "my_batch.py").write_text("raise ModuleNotFoundError('install [/it]')")
    (tmp_path / "echo.py").write_text(ECHO)
    install(tmp_path, BROKEN)

    def output_of(*arguments: str, code: int) -> str:
        with command(*arguments, PYTHONPATH=str(tmp_path), COLUMNS="200") as ran:
            assert ran.wait() == code, ran.stderr
        assert "Traceback" not in ran.stderr
        return ran.stdout if code == 0 else ran.stderr

    listed = output_of("--help", code=0)
    assert listed.count(" status ") == 1, "the command of Paceline's own is meant"
    assert "the plug-in 'moon' (my_batch:app) does not work: ModuleNotFoundError: install [/it]" in listed
    assert " coordinator " in listed
    missing = "does not work: ModuleNotFoundError: install [/it]. Mend or uninstall the package my-batch"
    for name, arguments in {
        "moon": ("moon", "--any", "thing"),
        "batch": ("run", str(tmp_path / "echo.py")),
        "star": ("run", "--engine", "star", str(tmp_path / "echo.py")),
    }.items():
        said = output_of(*arguments, code=2)
        assert said.startswith(f"paceline: the plug-in {name!r} (my_batch:"), said
        assert missing in said
