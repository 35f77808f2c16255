"""Dumps of the flight recorder: what is in the file, who may read it, and when it is written."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._base.activity import FlightRecorder
from paceline._session import flight
from paceline._session.flight import FlightLog, flight_directory
from paceline.errors import PeerLost
from support.waiting import wait_for


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    """Each test finds the signal, and leaves it, in its default meaning."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    flight._watching.clear()
    signal.signal(signal.SIGUSR2, before)


def make(directory: Path | None, **described: Any) -> FlightLog:
    recorder = FlightRecorder()
    recorder.issue("", 1, b"all_reduce op=sum float32[4]").begin()
    facts = {"job": "digits", "rank": 1, "size": 4, "generation": 7, "member_id": "m-1", **described}
    return FlightLog(recorder, lambda: facts, directory)


def read(path: Path | None) -> dict[str, Any]:
    assert path is not None
    found: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    return found


def test_dump_describes_the_session_and_its_operations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make(tmp_path / "flight", host="node-a").dump("signal SIGUSR2")
    assert path == tmp_path / "flight" / f"digits.rank1.pid{os.getpid()}.json"
    found = read(path)
    (operation,) = found.pop("operations")
    assert operation["state"] == "running"
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "job": "digits",
        "rank": 1,
        "size": 4,
        "generation": 7,
        "host": "node-a",
        "pid": os.getpid(),
        "member_id": "m-1",
        "reason": "signal SIGUSR2",
        "groups": {},
        "steps": [],
    }
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("paceline.flight", logging.WARNING)
    assert str(path) in record.getMessage()


def test_dump_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = make(tmp_path / "a" / "b").dump("test")
    finally:
        os.umask(before)
    assert path is not None
    modes = [stat.S_IMODE(found.stat().st_mode) for found in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_dump_contains_no_token_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "hush-environment")
    path = make(tmp_path, token=b"hush-token", environ=dict(os.environ)).dump("test")
    assert path is not None
    assert "hush" not in path.read_text(encoding="ascii")


def test_a_second_dump_replaces_the_first(tmp_path: Path) -> None:
    log = make(tmp_path)
    assert log.dump("first") == log.dump("second")
    assert [read(path)["reason"] for path in tmp_path.iterdir()] == ["second"]


def test_an_empty_recorder_can_be_dumped(tmp_path: Path) -> None:
    assert read(FlightLog(FlightRecorder(), dict, tmp_path).dump("test"))["operations"] == []


@pytest.mark.parametrize("job", ["../../etc/cron", "a/b", "", ".", "\0", "name with\nnewline", "ü" * 128, "x" * 256])
def test_a_job_name_cannot_escape_the_directory(tmp_path: Path, job: str) -> None:
    path = make(tmp_path / "flight", job=job).dump("test")
    assert path is not None
    assert path.parent == tmp_path / "flight"
    assert list(tmp_path.rglob("*.json")) == [path]
    assert len(path.name) < 128
    assert path.name.isascii()
    assert path.name.isprintable()


def test_different_job_names_give_different_files(tmp_path: Path) -> None:
    paths = {make(tmp_path, job=job).dump("test") for job in ("a/b", "a_b", "a\\b", "x" * 100, "x" * 101)}
    assert len(paths) == len(list(tmp_path.iterdir())) == 5


def test_ten_dumps_of_a_rank_are_kept(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("digits.rank2.pid5.json", "notes.json", "digits.rank1.pid5.json.bak")]
    old = [tmp_path / f"digits.rank1.pid{pid}.json" for pid in range(1, 13)]
    half = tmp_path / "digits.rank1.pid99.json.abc_12.tmp"  # whoever wrote it was killed
    for age, path in enumerate([*others, half, *old]):
        path.touch()
        os.utime(path, (age, age))
    latest = make(tmp_path).dump("test")
    assert latest is not None
    assert sorted(tmp_path.iterdir()) == sorted([*others, *old[-9:], latest])


def test_a_disabled_flight_log_writes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = make(None)
    log.watch_signal()
    assert log.dump("test") is None
    log.on_abort(PeerLost("gone"))
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert caplog.records == []


def test_flight_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert flight_directory({}) == tmp_path / f"paceline-{os.geteuid()}" / "flight"
    assert flight_directory({"PACELINE_FLIGHT_DIR": "/data/dumps"}) == Path("/data/dumps")
    assert flight_directory({"PACELINE_FLIGHT_DIR": "dumps"}) == Path.cwd() / "dumps"
    assert flight_directory({"PACELINE_FLIGHT_DIR": "off"}) is None
    assert flight_directory({"PACELINE_FLIGHT_DIR": ""}) is None
    assert list(tmp_path.iterdir()) == []


def test_a_failed_dump_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flight").write_text("a file")
    log = make(tmp_path / "flight")
    assert log.dump("first") is None
    assert log.dump("second") is None
    (record,) = caplog.records
    assert "NotADirectoryError" in record.getMessage()


def test_a_failing_description_does_not_raise_from_on_abort(tmp_path: Path) -> None:
    def describe() -> dict[str, Any]:
        raise RuntimeError("no view yet")

    log = FlightLog(FlightRecorder(), describe, tmp_path)
    log.on_abort(PeerLost("gone"))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    assert make(tmp_path).dump("test") is None
    assert list(tmp_path.iterdir()) == []


def test_a_raising_log_filter_does_not_prevent_the_dump(tmp_path: Path) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise RuntimeError("no logging today")

    logger = logging.getLogger("paceline.flight")
    logger.addFilter(refuse)
    try:
        assert make(tmp_path).dump("test") is not None
        assert make(Path("/dev/null/flight")).dump("test") is None
    finally:
        logger.removeFilter(refuse)


def test_a_symbolic_link_as_directory_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "flight").symlink_to(tmp_path / "elsewhere")
    assert make(tmp_path / "flight").dump("test") is None
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert "is a link or a file" in caplog.text


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert make(tmp_path).dump("test") is None
    assert list(tmp_path.iterdir()) == []
    assert f"belongs to uid {uid}, not {uid + 1}" in caplog.text


@pytest.mark.needs(what="root")
def test_a_parent_directory_of_another_user_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    planted = shared / "paceline-0"
    planted.mkdir()
    (planted / "flight").mkdir()
    os.chown(planted, 12345, -1)
    assert make(planted / "flight").dump("test") is None
    assert list((planted / "flight").iterdir()) == []
    assert "belongs to uid 12345" in caplog.text
    os.chown(planted, 0, -1)
    assert make(planted / "flight").dump("test") is not None


def test_a_symbolic_link_at_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as before")
    flights = tmp_path / "flight"
    flights.mkdir()
    (flights / f"digits.rank1.pid{os.getpid()}.json").symlink_to(precious)
    path = make(flights).dump("test")
    assert path is not None
    assert not path.is_symlink()
    assert precious.read_text() == "as before"


def test_an_abort_is_dumped_once_in_each_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TRACEBACK", "1")
    facts: dict[str, Any] = {"job": "digits", "rank": 1, "generation": 7}
    log = FlightLog(FlightRecorder(), lambda: facts, tmp_path)
    log.on_abort(PeerLost("rank 2 was lost"))
    log.on_abort(PeerLost("the generation has failed"))
    (path,) = tmp_path.iterdir()
    assert read(path)["reason"] == "abort: PeerLost: rank 2 was lost"
    facts["generation"] = 8
    log.on_abort(PeerLost("rank 3 was lost"))
    assert read(path)["reason"] == "abort: PeerLost: rank 3 was lost"
    assert len(caplog.records) == 2
    monkeypatch.delenv("PACELINE_TRACEBACK")
    facts["generation"] = 9
    log.on_abort(PeerLost("rank 4 was lost"))
    assert read(path)["reason"] == "abort: PeerLost: rank 4 was lost"
    assert len(caplog.records) == 2, "it is said only if one asks"


def test_threads_can_dump_concurrently(tmp_path: Path) -> None:
    log = make(tmp_path)
    threads = [threading.Thread(target=log.dump, args=(f"thread {index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = tmp_path.iterdir()
    assert read(path)["reason"].startswith("thread ")


def test_one_signal_reaches_all_sessions_of_a_process(tmp_path: Path) -> None:
    logs = [make(tmp_path, rank=rank) for rank in (0, 1, 2)]
    for log in logs:
        log.watch_signal()
    logs[0].close()
    signal.raise_signal(signal.SIGUSR2)
    wait_for(lambda: len(list(tmp_path.glob("*.json"))) == 2)
    assert {read(path)["rank"] for path in tmp_path.glob("*.json")} == {1, 2}
    assert {read(path)["reason"] for path in tmp_path.glob("*.json")} == {"signal SIGUSR2"}
    logs[1].close()
    assert signal.getsignal(signal.SIGUSR2) is flight._on_signal
    logs[2].close()
    logs[2].close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda number, frame: None])
def test_a_user_s_signal_handler_is_not_replaced(tmp_path: Path, own: Any) -> None:
    signal.signal(signal.SIGUSR2, own)
    log = make(tmp_path)
    log.watch_signal()
    assert signal.getsignal(signal.SIGUSR2) is own
    log.close()
    assert signal.getsignal(signal.SIGUSR2) is own


def test_a_signal_handler_set_later_is_not_replaced_on_close(tmp_path: Path) -> None:
    def own(*_: object) -> None: ...

    log = make(tmp_path)
    log.watch_signal()
    signal.signal(signal.SIGUSR2, own)
    log.close()
    assert signal.getsignal(signal.SIGUSR2) is own


def test_a_faulthandler_signal_handler_is_not_replaced(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR2, file)
        try:
            make(tmp_path).watch_signal()
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
            signal.raise_signal(signal.SIGUSR2)
        finally:
            faulthandler.unregister(signal.SIGUSR2)
    assert "test_flight.py" in (tmp_path / "stacks").read_text()


def test_watch_signal_outside_the_main_thread_sets_no_handler(tmp_path: Path) -> None:
    log = make(tmp_path)
    for action in (log.watch_signal, log.close):
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_session_closed_in_another_thread_is_not_dumped(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.watch_signal()
    thread = threading.Thread(target=log.close)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR2)  # handled still, or this process would be gone
    assert list(tmp_path.iterdir()) == []
    again = make(tmp_path)
    again.watch_signal()
    signal.raise_signal(signal.SIGUSR2)
    wait_for(lambda: list(tmp_path.glob("*.json")))
    again.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
