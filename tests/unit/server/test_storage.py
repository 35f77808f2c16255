"""What every storage must do, over all of them; and what the file does besides."""

import asyncio
import json
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from paceline_protocol import Ending, JobSettings, Tag, Verdict, View
from paceline_server.key_values import KeyValues
from paceline_server.limits import Budget
from paceline_server.settings import ServerSettings
from paceline_server.storage import job_records, schema
from paceline_server.storage.base import (
    AnswerKept,
    AnswersDropped,
    Change,
    EndingStored,
    FinishedStored,
    JobForgotten,
    KeyDeleted,
    KeySet,
    NumbersUsed,
    ReachedStored,
    StateUnusable,
    Storage,
    StoreCleared,
    StoredJob,
    VerdictStored,
    ViewForgotten,
    ViewFormed,
)
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.sqlite import SqliteStorage
from pacelinepb import RELEASE
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import run
from support.shared_keys import Node, next_leader
from support.views import view

Reopen = Callable[[], Storage]


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    memory, node = MemoryStorage(), Node()
    if request.param == "etcd":
        return lambda: next_leader(node)
    return (lambda: memory) if request.param == "memory" else lambda: SqliteStorage(tmp_path / "state.db")


VERDICT = Verdict(1, ErrorReason.ERROR_REASON_PEER_LOST, (0, 1), 9, "rank 0 died")


def stored(reopen: Reopen, *changes: Change) -> dict[str, StoredJob]:
    """What a storage gives back after a restart."""

    async def main() -> list[StoredJob]:
        storage = reopen()
        await storage.load()
        for change in changes:
            await storage.write([change])
        await storage.close()
        again = reopen()
        jobs = await again.load()
        await again.close()
        return jobs

    return {job.name: job for job in run(main)}


def test_a_new_storage_is_empty(reopen: Reopen) -> None:
    assert stored(reopen) == {}


def test_views_are_restored_unchanged(reopen: Reopen) -> None:
    jobs = stored(reopen, ViewFormed("a", view(1)), ViewFormed("b", view(4, 3)))
    assert jobs == {"a": StoredJob("a", 1, view(1)), "b": StoredJob("b", 4, view(4, 3))}


def test_the_secret_of_a_view_is_restored_and_forgotten_with_it(reopen: Reopen) -> None:
    formed = ViewFormed("a", view(1), b"\0one"), ViewFormed("a", view(2), b"\0two")
    jobs = stored(reopen, *formed)
    assert jobs == {"a": StoredJob("a", 2, view(2), door_secret=b"\0two")}
    assert "two" not in repr(jobs)
    assert stored(reopen, *formed, ViewForgotten("a", 2)) == {"a": StoredJob("a", 2)}


def test_verdict_and_endings_belong_to_their_view(reopen: Reopen) -> None:
    ending = Ending("left the job", orderly=True)
    changes = [ViewFormed("a", view(1)), EndingStored("a", 1, 1, ending), VerdictStored("a", VERDICT)]
    assert stored(reopen, *changes)["a"] == StoredJob("a", 1, view(1), VERDICT, {1: ending})
    late = [ViewFormed("a", view(2)), EndingStored("a", 1, 0, ending), VerdictStored("a", VERDICT)]
    assert stored(reopen, *late)["a"] == StoredJob("a", 2, view(2))


def test_a_forgotten_view_leaves_its_number(reopen: Reopen) -> None:
    changes = [ViewFormed("a", view(3)), ViewForgotten("a", 2), ViewForgotten("a", 3)]
    assert stored(reopen, *changes) == {"a": StoredJob("a", 3)}


def test_the_reached_step_is_kept_until_training_starts_over(reopen: Reopen) -> None:
    begun = replace(view(2), base=Tag(1, 40))
    assert stored(reopen, ViewFormed("a", view(1)), ViewFormed("a", begun))["a"].reached == 40
    over = [ReachedStored("a", 57), ViewForgotten("a", 2), ViewFormed("a", view(3))]
    assert stored(reopen, *over)["a"] == StoredJob("a", 3, view(3), reached=57)
    assert stored(reopen, ReachedStored("a", None))["a"].reached is None, "the line was done"
    anew = replace(view(4), base=Tag(0, 0), lost="57 steps")
    assert stored(reopen, ViewFormed("a", anew))["a"] == StoredJob("a", 4, anew, reached=0)


def test_only_the_last_values_of_existing_keys_are_restored(reopen: Reopen) -> None:
    changes = [KeySet("a", "k", b"1"), KeySet("a", "k", b"2"), KeySet("a", "gone", b""), KeyDeleted("a", "gone")]
    assert stored(reopen, *changes) == {"a": StoredJob("a", keys={"k": b"2"})}


def test_a_job_with_only_keys_and_answers_disappears_with_them(reopen: Reopen) -> None:
    written = [KeySet("a", "k", b"1"), AnswerKept("a", "m", 1, 1, 0)]
    assert stored(reopen, *written, KeyDeleted("a", "k"), AnswersDropped("a", "m")) == {}
    assert stored(reopen, *written, StoreCleared("a")) == {}
    assert stored(reopen, AnswersDropped("b", "m"), KeyDeleted("c", "k")) == {}


def test_the_last_answer_of_each_slot_is_restored(reopen: Reopen) -> None:
    kept = [AnswerKept("a", "m/1", slot, call, -call) for slot, call in ((0, 16), (1, 17), (0, 32))]
    others = [AnswerKept("a", "other", 3, 3, 1 << 62), AnswerKept("a", "gone", 1, 1, 0), AnswersDropped("a", "gone")]
    answers = {"m/1": {0: (32, -32), 1: (17, -17)}, "other": {3: (3, 1 << 62)}}
    key = KeySet("a", "answers/other", b"not an answer")
    assert stored(reopen, key, *kept, *others) == {"a": StoredJob("a", keys={key.key: key.value}, answers=answers)}


def test_answers_to_all_kinds_of_calls_are_restored(reopen: Reopen) -> None:
    values = KeyValues("a", ServerSettings(), Budget(1 << 30), {})
    changes = [
        *values.set("k", b"1", "m", 1),
        *values.compare_set("m", 2, "k", b"1", b"-3")[2],
        *values.add("m", 3, "k", -4)[1],
        *values.delete("k", "m", 4)[1],
    ]
    (job,) = stored(reopen, *changes).values()
    again = KeyValues("a", ServerSettings(), Budget(1 << 30), job.keys, job.answers)
    assert again.set("k", b"1", "m", 1) == []
    assert again.compare_set("m", 2, "k", b"1", b"-3") == (True, b"-3", [])
    assert again.add("m", 3, "k", -4) == (-7, [])
    assert again.delete("k", "m", 4) == (True, [])


def test_clearing_a_store_keeps_the_job(reopen: Reopen) -> None:
    keys = [KeySet(name, key, b"v") for name in "ab" for key in "kl"]
    jobs = stored(reopen, ViewFormed("a", view(3)), *keys, AnswerKept("a", "m", 1, 1, 0), StoreCleared("a"))
    assert jobs == {"a": StoredJob("a", 3, view(3)), "b": StoredJob("b", keys={"k": b"v", "l": b"v"})}


def test_used_generation_numbers_never_decrease(reopen: Reopen) -> None:
    changes = [NumbersUsed("", 7), NumbersUsed("", 5), ViewFormed("a", view(3)), NumbersUsed("a", 4)]
    jobs = stored(reopen, *changes)
    assert jobs[""] == StoredJob("", 7)
    assert jobs["a"].generation == 4


def test_a_forgotten_job_leaves_nothing(reopen: Reopen) -> None:
    changes: list[Change] = []
    for name in "ab":
        changes += [ViewFormed(name, view(3)), FinishedStored(name, 7), KeySet(name, "k", b"v")]
        changes.append(AnswerKept(name, "m", 1, 1, 0))
    kept = StoredJob("b", 3, view(3), finished=7, keys={"k": b"v"}, answers={"m": {1: (1, 0)}})
    assert stored(reopen, *changes, JobForgotten("a")) == {"b": kept}
    again = StoredJob("a", 1, view(1))  # with nothing of before
    assert stored(reopen, ViewFormed("a", view(1)))["a"] == again


def test_sqlite_syncs_its_log_at_each_commit(tmp_path: Path) -> None:
    """Even one that a power failure would otherwise take back: a generation number is used once (I3)."""
    with closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as connection:
        schema.prepare(connection)
        (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
        (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
    assert (synchronous, journal) == (2, "wal"), "2 is FULL: the log is synced at each commit"


def test_a_state_file_in_use_is_refused_to_a_second_coordinator(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = SqliteStorage(tmp_path / "s.db"), SqliteStorage(tmp_path / "s.db")
        await first.load()
        with pytest.raises(StateUnusable, match=r"cannot use the state file .*s\.db: another coordinator"):
            await second.load()
        await second.close()
        await first.close()

    run(main)


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_a_state_file_of_an_older_version_is_migrated(tmp_path: Path, version: int) -> None:
    """Version 2 knew neither nodes nor tables of schedules, 3 nothing of what is lost, 4 no secret, 5 no answers."""
    path = tmp_path / "s.db"
    assert stored(lambda: SqliteStorage(path), ViewFormed("a", view(3)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        added = {2: [("job", "tuning"), ("seat", "node")], 3: [("job", "reached"), ("job", "lost")]}
        added[4] = [("job", "door_secret")]
        for table, column in (each for before, columns in added.items() if before >= version for each in columns):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.execute("DROP TABLE answer")
        connection.execute(f"PRAGMA user_version={version}")
    job = stored(lambda: SqliteStorage(path))["a"]
    assert job.view is not None
    expected = view(3)
    if version == 2:
        seats = tuple(replace(seat, process=replace(seat.process, node="")) for seat in expected.seats)
        expected = replace(expected, settings=JobSettings(1, 4, 2.5), seats=seats)
    assert (job.view, job.reached, job.door_secret) == (expected, None, b"")


@pytest.mark.parametrize("what", ["none", "of the view before", "of a job that was forgotten"])
def test_a_view_stored_by_the_previous_release_gets_version_8(tmp_path: Path, what: str) -> None:
    """It knows nothing of `view_versions`, and leaves what is there."""
    path = tmp_path / "s.db"
    stored(lambda: SqliteStorage(path), ViewFormed("a", view(1)), ViewFormed("b", view(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if what == "none":
            connection.execute("DROP TABLE view_versions")
            connection.execute("DROP TABLE writer")
        elif what == "of the view before":
            connection.execute("UPDATE job SET generation = 2")
        else:
            connection.execute("UPDATE seat SET member_id = 'another' WHERE rank = 0")
    jobs = stored(lambda: SqliteStorage(path))
    assert [job.view.version for job in jobs.values() if job.view is not None] == [8, 8]


def test_a_forgotten_job_leaves_no_row_in_view_versions(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    stored(lambda: SqliteStorage(path), ViewFormed("a", view(1)), ViewFormed("b", view(1)), JobForgotten("a"))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT job, generation, newest FROM view_versions").fetchall() == [("b", 1, 9)]
        assert connection.execute("SELECT release FROM writer").fetchall() == [(RELEASE,)]


def test_stale_side_tables_of_the_previous_release_are_repaired(tmp_path: Path) -> None:
    """It forgets a job and not the versions of its view, and it does not say that it has used the file."""
    path = tmp_path / "s.db"
    stored(lambda: SqliteStorage(path), ViewFormed("a", view(1)), ViewFormed("b", view(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM job WHERE name = 'a'")
        connection.execute("DELETE FROM seat WHERE job = 'a'")
        connection.execute("UPDATE writer SET release = 'Paceline 0.0.9'")
    stored(lambda: SqliteStorage(path))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT job FROM view_versions").fetchall() == [("b",)]
        assert connection.execute("SELECT release FROM writer").fetchall() == [(RELEASE,)]


def test_extra_side_table_columns_of_a_later_release_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    stored(lambda: SqliteStorage(path), ViewFormed("a", view(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("ALTER TABLE view_versions ADD COLUMN more INTEGER")
        connection.execute("ALTER TABLE writer ADD COLUMN more INTEGER")
        connection.execute("UPDATE writer SET release = 'Paceline 7'")
    jobs = stored(lambda: SqliteStorage(path), ViewFormed("b", view(1)))
    assert [job.view for job in jobs.values()] == [view(1), view(1)]


@pytest.mark.parametrize("versions", [(0, 9), (-1, 9), (9, 1 << 17), (9, 8)])
def test_an_invalid_version_range_raises_state_unusable(tmp_path: Path, versions: tuple[int, int]) -> None:
    path = tmp_path / "s.db"
    stored(lambda: SqliteStorage(path), ViewFormed("a", view(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE view_versions SET oldest = ?, newest = ?", versions)

    async def main() -> None:
        storage = SqliteStorage(path)
        with pytest.raises(StateUnusable, match=r"job 'a' is damaged: its (view|record.view.versions)"):
            await storage.load()
        await storage.close()

    run(main)


@pytest.mark.parametrize("kind", ["row", "ranks", "schema"])
def test_a_damaged_state_file_raises_state_unusable(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.db"
    assert stored(lambda: SqliteStorage(path), ViewFormed("a", view(1)), VerdictStored("a", VERDICT))
    if kind != "schema":
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("UPDATE job SET " + ("culprits = 'nobody'" if kind == "row" else "newcomers = '7'"))
    else:
        data = path.read_bytes()
        assert data.count(b"CREATE TABLE seat") == 1
        path.write_bytes(data.replace(b"CREATE TABLE seat", b"CREATE TABLE \xff\xfe\xfd\xfc"))

    async def main() -> None:
        storage = SqliteStorage(path)
        with pytest.raises(StateUnusable, match=r"cannot use the state file .*s\.db: "):
            await asyncio.wait_for(storage.load(), 5.0)
        await storage.close()

    run(main)


@pytest.mark.parametrize("kind", ["garbage", "other", "future", "folder"])
def test_a_foreign_or_newer_state_file_raises_state_unusable(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.db"
    if kind == "garbage":
        path.write_bytes(b"no database at all" * 100)
    elif kind == "folder":
        path.mkdir()
    else:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE t (x)")
        if kind == "future":
            connection.execute(f"PRAGMA application_id={0x50414345}")
            connection.execute("PRAGMA user_version=99")
            connection.execute("CREATE TABLE writer (release TEXT NOT NULL) STRICT")
            connection.execute("INSERT INTO writer VALUES ('Paceline 7.0.0')")
            connection.commit()
        connection.close()

    path.chmod(path.stat().st_mode & ~0o077)
    future = r"it is of format 99, written by Paceline 7\.0\.0, and this release .* reads formats up to 6: start"

    async def main() -> None:
        storage = SqliteStorage(path)
        with pytest.raises(StateUnusable, match=f"cannot use the state file .*{future if kind == 'future' else ''}"):
            await storage.load()
        await storage.close()

    run(main)


@pytest.mark.parametrize(
    "change",
    [
        KeySet("a", "y", None),  # type: ignore[arg-type]
        KeySet("a", "half a character: \ud800", b"2"),
        VerdictStored("a", replace(VERDICT, operation=2**63)),
    ],
    ids=["nothing", "no text", "too great"],
)
def test_a_change_that_cannot_be_stored_does_not_fail_others(tmp_path: Path, change: Change) -> None:
    async def main() -> None:
        storage = SqliteStorage(tmp_path / "s.db")
        await storage.load()
        first = storage.write([KeySet("a", "x", b"1")])
        bad = storage.write([change])
        last = storage.write([KeySet("a", "z", b"3")])
        await first
        with pytest.raises(OSError, match="cannot write the state file"):
            await asyncio.wait_for(bad, 5.0)
        await last
        await storage.close()

    run(main)
    reopen = lambda: SqliteStorage(tmp_path / "s.db")  # noqa: E731
    assert stored(reopen)["a"].keys == {"x": b"1", "z": b"3"}


def replicas(generation: int) -> View:
    """A view of two replicas of two members."""
    seats = view(generation, 4).seats
    return replace(
        view(generation, 4),
        settings=replace(view(1).settings, replica_size=2),
        seats=tuple(replace(seat, replica="cd"[seat.rank // 2], replica_size=2) for seat in seats),
    )


def test_a_view_of_replicas_is_restored_unchanged(reopen: Reopen) -> None:
    jobs = stored(reopen, ViewFormed("a", replicas(1)), ViewFormed("b", view(4, 3)))
    assert jobs == {"a": StoredJob("a", 1, replicas(1)), "b": StoredJob("b", 4, view(4, 3))}
    assert [seat.number for seat in replicas(1).seats] == [0, 0, 1, 1]


def test_a_view_without_replicas_follows_one_with_replicas(reopen: Reopen) -> None:
    jobs = stored(reopen, ViewFormed("a", replicas(1)), ViewFormed("a", view(2)))
    assert jobs == {"a": StoredJob("a", 2, view(2))}


def test_a_forgotten_job_leaves_no_row_in_replicas(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    stored(lambda: SqliteStorage(path), ViewFormed("a", replicas(1)), ViewFormed("b", replicas(1)), JobForgotten("a"))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT job, size, ids FROM replicas").fetchall() == [("b", 2, "c d")]


def test_a_state_file_without_the_table_of_replicas_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    stored(lambda: SqliteStorage(path), ViewFormed("a", view(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TABLE replicas")
    assert stored(lambda: SqliteStorage(path)) == {"a": StoredJob("a", 1, view(1))}


@pytest.mark.parametrize("damage", ["size = 3", "size = 0", "ids = 'c'"])
def test_a_damaged_row_of_replicas_raises_state_unusable(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "s.db"
    stored(lambda: SqliteStorage(path), ViewFormed("a", replicas(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"UPDATE replicas SET {damage}")

    async def main() -> None:
        storage = SqliteStorage(path)
        with pytest.raises(StateUnusable):
            await storage.load()
        await storage.close()

    run(main)


def test_a_record_of_an_ending_has_only_what_earlier_releases_read() -> None:
    """That a process lives on is not stored."""
    ending = Ending("came back as a new member", orderly=False, lives=True)
    job = StoredJob("a", 1, view(1), VERDICT, {1: ending})
    value = job_records.value_of(f"{job_records.JOBS}a/endings", {"a": job})
    assert value is not None
    assert json.loads(zlib.decompress(value)) == {
        "1": {"how": "came back as a new member", "orderly": False, "sure": True}
    }
