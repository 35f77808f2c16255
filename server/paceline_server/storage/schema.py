"""The tables of the state file, and each change as SQL. Knows nothing of threads or of the purpose of the changes."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

from paceline_protocol import UNTOLD, Ending, JobSettings, Process, Seat, Tag, Verdict, Versions, View
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
    StoreCleared,
    StoredJob,
    VerdictStored,
    ViewForgotten,
    ViewFormed,
)
from paceline_server.storage.checks import check_writer
from pacelinepb import RELEASE
from pacelinepb.v1.errors_pb2 import ErrorReason

_APPLICATION_ID = 0x50414345  # "PACE": tells `file` and us our file from another program's database
_VERSION = 6

_ANSWERS = """
CREATE TABLE answer (
    job TEXT NOT NULL,
    member_id TEXT NOT NULL,
    slot INTEGER NOT NULL,                -- the last calls of a member have one each
    call INTEGER NOT NULL,
    answer INTEGER NOT NULL,
    PRIMARY KEY (job, member_id, slot)
) STRICT, WITHOUT ROWID;
"""

_BESIDE = (
    "CREATE TABLE IF NOT EXISTS writer (release TEXT NOT NULL) STRICT",
    """
CREATE TABLE IF NOT EXISTS view_versions (
    job TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    first_member_id TEXT NOT NULL,        -- of rank 0
    oldest INTEGER NOT NULL,              -- version of the protocol that all members speak
    newest INTEGER NOT NULL
) STRICT, WITHOUT ROWID
""",
    """
CREATE TABLE IF NOT EXISTS replicas (
    job TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    first_member_id TEXT NOT NULL,
    size INTEGER NOT NULL,                -- ranks of a replica, above 1
    ids TEXT NOT NULL                     -- of the view's replicas in order, separated by spaces
) STRICT, WITHOUT ROWID
""",
)
"""Tables that coordinators of format 6 may have or not: one that does not know them leaves them as they are. So a row
says something of a view only if it names its generation and its first member."""

_FROM = {
    2: """
ALTER TABLE job ADD COLUMN tuning TEXT NOT NULL DEFAULT '';
ALTER TABLE seat ADD COLUMN node TEXT NOT NULL DEFAULT '';
""",
    3: """
ALTER TABLE job ADD COLUMN reached INTEGER;
ALTER TABLE job ADD COLUMN lost TEXT NOT NULL DEFAULT '';
""",
    4: "ALTER TABLE job ADD COLUMN door_secret BLOB NOT NULL DEFAULT x'';",
    5: _ANSWERS,
}
"""The SQL that turns a file of one version into a file of the next."""

_TABLES = """
CREATE TABLE job (
    name TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,          -- the highest number used; never falls (I3)
    has_view INTEGER NOT NULL,            -- 0 once the view is forgotten
    min_workers INTEGER NOT NULL,
    max_workers INTEGER NOT NULL,
    failure_timeout REAL NOT NULL,        -- seconds
    explicit INTEGER NOT NULL,            -- 1 if members claimed their ranks
    reason INTEGER,                       -- the verdict's ErrorReason, NULL while the view is live
    culprits TEXT,                        -- ranks, ascending, joined by commas
    operation INTEGER,
    text TEXT,
    base_generation INTEGER,              -- the tag that the view starts from, NULL if it has none
    base_step INTEGER,
    newcomers TEXT NOT NULL,              -- ranks without the base, ascending, joined by commas
    manifest BLOB NOT NULL,
    finished INTEGER,                     -- the last step of a line that is done
    tuning TEXT NOT NULL,                 -- hash of the members' table of schedules
    reached INTEGER,                      -- steps that the last line is known to have committed, NULL if there was none
    lost TEXT NOT NULL,                   -- what was trained before the view's line began and is lost
    door_secret BLOB NOT NULL             -- with it members prove to each other that they belong to the job
) STRICT;
CREATE TABLE seat (
    job TEXT NOT NULL,
    rank INTEGER NOT NULL,
    member_id TEXT NOT NULL,
    token_sha256 BLOB NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    boot_id TEXT NOT NULL,
    start_ticks INTEGER NOT NULL,
    pid_namespace INTEGER NOT NULL,
    address TEXT NOT NULL,
    arrival INTEGER NOT NULL,
    ended TEXT,                           -- how the member ended, NULL while it is present
    orderly INTEGER,
    sure INTEGER,                         -- 0: it was only silent
    node TEXT NOT NULL,                   -- equal for members that share memory
    PRIMARY KEY (job, rank)
) STRICT, WITHOUT ROWID;
CREATE TABLE key (
    job TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (job, key)
) STRICT;
"""


class NotAStateFile(Exception):
    """The database belongs to another program, or to another version of the coordinator."""


def prepare(connection: sqlite3.Connection) -> None:
    """Locks the file for this connection, and creates the tables if there are none.

    Raises `NotAStateFile` if the file holds something else, and sqlite3.Error if it is no database, or another
    connection has it.
    """
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables:
        marks = f"PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_VERSION};"
        connection.executescript(f"BEGIN; {_TABLES} {_ANSWERS} {marks} COMMIT;")
    elif application != _APPLICATION_ID:
        raise NotAStateFile("it is another program's database")
    elif version in _FROM:
        changes = "".join(sql for before, sql in _FROM.items() if before >= version)
        connection.executescript(f"BEGIN; {changes} PRAGMA user_version={_VERSION}; COMMIT;")
    elif version != _VERSION:
        raise NotAStateFile(_why_not(connection, version))
    connection.execute("BEGIN IMMEDIATE")  # takes the lock now, not at the first write
    for table in _BESIDE:
        connection.execute(table)
    # A coordinator that does not know the table has forgotten these jobs.
    connection.execute("DELETE FROM view_versions WHERE job NOT IN (SELECT name FROM job)")
    connection.execute("DELETE FROM replicas WHERE job NOT IN (SELECT name FROM job)")
    if _writer(connection) != RELEASE:
        connection.execute("DELETE FROM writer")
        connection.execute("INSERT INTO writer (release) VALUES (?)", (RELEASE,))
    connection.execute("COMMIT")


def _why_not(connection: sqlite3.Connection, version: int) -> str:
    """Says why a state file of another format cannot be used."""
    try:
        check_writer(version, _writer(connection), _VERSION)
    except ValueError as error:
        return str(error)
    return f"it is of format {version}, which no release has written"


def _writer(connection: sqlite3.Connection) -> object:
    """The release that has used the file last, empty if that is not known."""
    try:
        found = connection.execute("SELECT release FROM writer").fetchone()
    except sqlite3.Error:  # there is no such table
        return ""
    return "" if found is None else found[0]


def load(connection: sqlite3.Connection) -> list[StoredJob]:
    """Returns all jobs."""
    told = {
        (job, generation, first): Versions(oldest, newest)
        for job, generation, first, oldest, newest in connection.execute(
            "SELECT job, generation, first_member_id, oldest, newest FROM view_versions"
        )
    }
    replicas = {
        (job, generation, first): (size, ids.split())
        for job, generation, first, size, ids in connection.execute(
            "SELECT job, generation, first_member_id, size, ids FROM replicas"
        )
    }
    jobs: dict[str, StoredJob] = {}
    for (
        name,
        generation,
        has_view,
        least,
        most,
        timeout,
        explicit,
        reason,
        culprits,
        operation,
        text,
        base_generation,
        base_step,
        newcomers,
        manifest,
        finished,
        tuning,
        reached,
        lost,
        door_secret,
    ) in connection.execute("SELECT * FROM job ORDER BY name"):
        job = jobs[name] = StoredJob(name, generation, finished=finished, reached=reached, door_secret=door_secret)
        if has_view:
            seats = _load_seats(connection, job)
            base = None if base_generation is None else Tag(base_generation, base_step)
            first = seats[0].member_id if seats else ""
            versions = told.get((name, generation, first), UNTOLD)
            size, ids = replicas.get((name, generation, first), (1, []))
            if size > 1 and len(ids) * size == len(seats):  # else it is refused, as damage
                seats = tuple(replace(s, replica=ids[s.rank // size], replica_size=size) for s in seats)
            settings = JobSettings(least, most, timeout, tuning, size)
            job.view = View(
                generation, settings, bool(explicit), seats, versions, base, _split(newcomers), manifest, lost
            )
        if has_view and reason is not None:
            job.verdict = Verdict(generation, ErrorReason.ValueType(reason), _split(culprits), operation, text)
    for name, key, value in connection.execute("SELECT job, key, value FROM key"):
        jobs.setdefault(name, StoredJob(name)).keys[key] = value
    for name, member_id, slot, call, answer in connection.execute("SELECT * FROM answer"):
        jobs.setdefault(name, StoredJob(name)).answers.setdefault(member_id, {})[slot] = (call, answer)
    return list(jobs.values())


def _load_seats(connection: sqlite3.Connection, job: StoredJob) -> tuple[Seat, ...]:
    seats = []
    for (
        rank,
        member_id,
        token,
        host,
        pid,
        boot,
        ticks,
        space,
        address,
        arrival,
        how,
        orderly,
        sure,
        node,
    ) in connection.execute(
        "SELECT rank, member_id, token_sha256, host, pid, boot_id, start_ticks, pid_namespace, address, arrival, "
        "ended, orderly, sure, node FROM seat WHERE job = ? ORDER BY rank",
        (job.name,),
    ):
        seats.append(Seat(rank, member_id, Process(host, pid, boot, ticks, space, node), address, token, arrival))
        if how is not None:
            job.endings[rank] = Ending(how, bool(orderly), bool(sure))
    return tuple(seats)


def _split(ranks: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in ranks.split(",") if rank)


def apply(connection: sqlite3.Connection, change: Change) -> None:
    """Writes one change; the caller opens and commits the transaction."""
    match change:
        case ViewFormed(job, view, door_secret):
            _store_view(connection, job, view, door_secret)
        case ViewForgotten(job, generation):
            connection.execute(
                "DELETE FROM seat WHERE job = ? AND EXISTS (SELECT 1 FROM job WHERE name = ? AND generation = ?)",
                (job, job, generation),
            )
            connection.execute(
                "UPDATE job SET has_view = 0, reason = NULL, door_secret = x'' WHERE name = ? AND generation = ?",
                (job, generation),
            )
        case VerdictStored(job, verdict):
            connection.execute(
                "UPDATE job SET reason = ?, culprits = ?, operation = ?, text = ? WHERE name = ? AND generation = ?",
                (
                    verdict.reason,
                    ",".join(map(str, verdict.culprits)),
                    verdict.operation,
                    verdict.text,
                    job,
                    verdict.generation,
                ),
            )
        case EndingStored(job, generation, rank, ending):
            connection.execute(
                "UPDATE seat SET ended = ?, orderly = ?, sure = ? WHERE job = ? AND rank = ? "
                "AND EXISTS (SELECT 1 FROM job WHERE name = ? AND generation = ?)",
                (ending.how, ending.orderly, ending.sure, job, rank, job, generation),
            )
        case FinishedStored(job, step):
            connection.execute("UPDATE job SET finished = ? WHERE name = ?", (step, job))
        case ReachedStored(job, step):
            connection.execute("UPDATE job SET reached = ? WHERE name = ?", (step, job))
        case KeySet(job, key, value):
            connection.execute("INSERT OR REPLACE INTO key VALUES (?, ?, ?)", (job, key, value))
        case KeyDeleted(job, key):
            connection.execute("DELETE FROM key WHERE job = ? AND key = ?", (job, key))
        case AnswerKept(job, member_id, slot, call, answer):
            connection.execute(
                "INSERT OR REPLACE INTO answer VALUES (?, ?, ?, ?, ?)", (job, member_id, slot, call, answer)
            )
        case AnswersDropped(job, member_id):
            connection.execute("DELETE FROM answer WHERE job = ? AND member_id = ?", (job, member_id))
        case StoreCleared(job):
            connection.execute("DELETE FROM key WHERE job = ?", (job,))
            connection.execute("DELETE FROM answer WHERE job = ?", (job,))
        case NumbersUsed(job, generation):
            connection.execute(
                "INSERT INTO job VALUES (?, ?, 0, 1, 1, 1, 0, NULL, NULL, NULL, NULL, NULL, NULL, '', x'', NULL, '', "
                "NULL, '', x'') ON CONFLICT (name) DO UPDATE SET generation = max(generation, excluded.generation)",
                (job, generation),
            )
        case JobForgotten(job):
            for statement in (
                "DELETE FROM job WHERE name = ?",
                "DELETE FROM seat WHERE job = ?",
                "DELETE FROM key WHERE job = ?",
                "DELETE FROM answer WHERE job = ?",
                "DELETE FROM view_versions WHERE job = ?",
                "DELETE FROM replicas WHERE job = ?",
            ):
                connection.execute(statement, (job,))


def _store_view(connection: sqlite3.Connection, job: str, view: View, door_secret: bytes) -> None:
    settings, base = view.settings, view.base or (None, None)
    found = connection.execute("SELECT reached FROM job WHERE name = ?", (job,)).fetchone()
    reached = view.base.step if view.base is not None else found[0] if found is not None else None
    row = (job, view.generation, settings.min_workers, settings.max_workers, settings.failure_timeout, view.explicit)
    connection.execute(
        "INSERT OR REPLACE INTO job VALUES (?, ?, 1, ?, ?, ?, ?, NULL, NULL, NULL, NULL, ?, ?, ?, ?, NULL, ?, ?, ?, ?)",
        (
            *row,
            *base,
            ",".join(map(str, view.newcomers)),
            view.manifest,
            settings.tuning,
            reached,
            view.lost,
            door_secret,
        ),
    )
    connection.execute(
        "INSERT OR REPLACE INTO view_versions (job, generation, first_member_id, oldest, newest) "
        "VALUES (?, ?, ?, ?, ?)",
        (job, view.generation, view.seats[0].member_id, view.versions.oldest, view.versions.newest),
    )
    size = settings.replica_size
    connection.execute("DELETE FROM replicas WHERE job = ?", (job,))
    if size > 1:
        ids = " ".join(seat.replica for seat in view.seats[::size])
        connection.execute(
            "INSERT INTO replicas VALUES (?, ?, ?, ?, ?)", (job, view.generation, view.seats[0].member_id, size, ids)
        )
    connection.execute("DELETE FROM seat WHERE job = ?", (job,))
    connection.executemany(
        "INSERT INTO seat VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL, ?)",
        [
            (
                job,
                seat.rank,
                seat.member_id,
                seat.token_sha256,
                seat.process.host,
                seat.process.pid,
                seat.process.boot_id,
                seat.process.start_ticks,
                seat.process.pid_namespace,
                seat.address,
                seat.arrival,
                seat.process.node,
            )
            for seat in view.seats
        ],
    )
