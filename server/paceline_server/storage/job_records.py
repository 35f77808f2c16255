"""Jobs as keys and values of a shared store, and which keys a change touches. Pure.

PREFIX/format says how all of this is written, and which release wrote it last.

Each job has the keys PREFIX/jobs/NAME/: `head` (numbers and the verdict), `view`, `endings`, `key/K` for each key K of
its store, and `key/answers/M` for the answers that member M may ask for again. Names are percent-encoded, so no K has a
slash. Values are JSON; long ones are compressed, since a view of thousands of members
must fit into one request of etcd (1.5 MB).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import quote, unquote

from paceline_protocol import UNTOLD, Ending, JobSettings, Process, Seat, Tag, Verdict, Versions, View
from paceline_server.storage.base import (
    AnswerKept,
    AnswersDropped,
    Change,
    EndingStored,
    JobForgotten,
    KeyDeleted,
    KeySet,
    StoreCleared,
    StoredJob,
    ViewForgotten,
    ViewFormed,
)
from paceline_server.storage.checks import check_job, check_writer
from paceline_server.storage.shared_keys import Item
from pacelinepb import RELEASE
from pacelinepb.v1.errors_pb2 import ErrorReason

FORMAT = "format"
"""The key of the format, behind the prefix of the state."""

_FORMAT = 1
"""The number grows when an older coordinator would misread what is written."""

JOBS = "jobs/"
"""The prefix of the keys of jobs, behind the prefix of the state."""

_MOST_BYTES = 64 << 20
"""The longest value once it is no longer compressed."""

_KEY = "key/"
_ANSWERS = "key/answers/"  # what empties a store empties this, too

_DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, zlib.error)
"""The errors of reading a value that Paceline has not written."""


def format_of_ours() -> bytes:
    """Returns the value of the key FORMAT that this release writes."""
    return json.dumps({"format": _FORMAT, "release": RELEASE}).encode()


def check_format(value: bytes) -> None:
    """Checks that this release reads a state whose key FORMAT has this value."""
    try:
        read = json.loads(value)
        number, writer = read["format"], read["release"]
    except _DAMAGE:
        number, writer = 0, ""
    check_writer(number, writer, _FORMAT)


def emptied_by(change: Change) -> str | None:
    """Returns the prefix of which a change deletes all keys; None if it does not do that."""
    if isinstance(change, StoreCleared):
        return _of(change.job) + _KEY
    return _of(change.job) if isinstance(change, JobForgotten) else None


def touched_by(change: Change) -> Iterable[str]:
    """Returns the keys whose values a change may change, but for those that `emptied_by` covers."""
    match change:
        case KeySet(job, key) | KeyDeleted(job, key):
            return (f"{_of(job)}{_KEY}{quote(key, safe='')}",)
        case AnswerKept(job, member_id) | AnswersDropped(job, member_id):
            return (f"{_of(job)}{_ANSWERS}{quote(member_id, safe='')}",)
        case StoreCleared() | JobForgotten():
            return ()
        case ViewFormed(job) | ViewForgotten(job):
            return (f"{_of(job)}head", f"{_of(job)}view", f"{_of(job)}endings")
        case EndingStored(job):
            return (f"{_of(job)}endings",)
        case _:
            return (f"{_of(change.job)}head",)


def value_of(name: str, jobs: dict[str, StoredJob]) -> bytes | None:
    """Returns the value of a key, of jobs as they are to be stored; None if there must be no such key."""
    quoted, kind = name.removeprefix(JOBS).split("/", 1)
    job = jobs.get(unquote(quoted))
    if job is None:
        return None
    if kind == "head":
        verdict = None if job.verdict is None else asdict(job.verdict)
        return _packed(
            {"generation": job.generation, "finished": job.finished, "reached": job.reached, "void": verdict}
        )
    if kind == "view":
        return None if job.view is None else _packed(_view_out(job.view, job.door_secret))
    if kind == "endings":
        # These alone: earlier releases take no others.
        endings = {rank: {"how": e.how, "orderly": e.orderly, "sure": e.sure} for rank, e in job.endings.items()}
        return _packed(endings) if endings else None
    if kind.startswith(_ANSWERS):
        answers = job.answers.get(unquote(kind.removeprefix(_ANSWERS)))
        return _packed(answers) if answers else None
    return job.keys.get(unquote(kind.removeprefix(_KEY)))


def jobs_of(items: Iterable[Item], prefix: str) -> dict[str, StoredJob]:
    """Reads all jobs; their keys begin with `prefix`, up to the name of the job."""
    jobs: dict[str, StoredJob] = {}
    for item in items:
        try:
            quoted, kind = item.key.decode().removeprefix(prefix).split("/", 1)
            name = unquote(quoted)
            job = jobs.setdefault(name, StoredJob(name))
            if kind.startswith(_KEY) and not kind.startswith(_ANSWERS):
                job.keys[unquote(kind.removeprefix(_KEY))] = item.value
            else:
                _read_into(job, kind, _unpacked(item.value))
        except _DAMAGE as error:
            raise ValueError(f"the key {item.key!r} is damaged ({error})") from None
    for job in jobs.values():
        check_job(job)
    return jobs


def _read_into(job: StoredJob, kind: str, read: Any) -> None:
    if kind == "head":
        job.generation, job.finished, job.reached = int(read["generation"]), read["finished"], read["reached"]
        if (void := read["void"]) is not None:
            reason = ErrorReason.ValueType(void["reason"])
            job.verdict = Verdict(void["generation"], reason, tuple(void["culprits"]), void["operation"], void["text"])
    elif kind == "view":
        job.view, job.door_secret = _view_in(read), bytes.fromhex(read["door_secret"])
    elif kind == "endings":
        job.endings = {int(rank): Ending(**ending) for rank, ending in read.items()}
    elif kind.startswith(_ANSWERS):
        answers = {int(slot): (call, answer) for slot, (call, answer) in read.items()}
        job.answers[unquote(kind.removeprefix(_ANSWERS))] = answers
    else:
        raise KeyError(kind)


def _of(job: str) -> str:
    return f"{JOBS}{quote(job, safe='')}/"


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def _unpacked(data: bytes) -> Any:
    inflater = zlib.decompressobj()
    text = inflater.decompress(data, _MOST_BYTES)
    if not inflater.eof:
        raise ValueError("it is cut short, or too long")
    return json.loads(text)


def _view_out(view: View, door_secret: bytes) -> dict[str, Any]:
    settings = view.settings
    return {
        "generation": view.generation,
        "settings": [settings.min_workers, settings.max_workers, settings.failure_timeout, settings.tuning],
        "explicit": view.explicit,
        "versions": [view.versions.oldest, view.versions.newest],
        "base": view.base,
        "newcomers": view.newcomers,
        "manifest": view.manifest.hex(),
        "lost": view.lost,
        "door_secret": door_secret.hex(),
        **({"replicas": [settings.replica_size, *_ids(view)]} if settings.replica_size > 1 else {}),
        "seats": [
            [
                seat.member_id,
                seat.token_sha256.hex(),
                [
                    seat.process.host,
                    seat.process.pid,
                    seat.process.boot_id,
                    seat.process.start_ticks,
                    seat.process.pid_namespace,
                    seat.process.node,
                ],
                seat.address,
                seat.arrival,
            ]
            for seat in view.seats
        ],
    }


def _ids(view: View) -> list[str]:
    return [seat.replica for seat in view.seats[:: view.settings.replica_size]]


def _view_in(read: Any) -> View:
    size, *ids = read.get("replicas", (1,))
    seats = tuple(
        Seat(
            rank,
            member_id,
            Process(*process),
            address,
            bytes.fromhex(token),
            arrival,
            ids[rank // size] if ids else "",
            size,
        )
        for rank, (member_id, token, process, address, arrival) in enumerate(read["seats"])
    )
    base = None if read["base"] is None else Tag(*read["base"])
    return View(
        read["generation"],
        replace(JobSettings(*read["settings"]), replica_size=size),
        read["explicit"],
        seats,
        Versions(*read["versions"]) if "versions" in read else UNTOLD,
        base,
        tuple(read["newcomers"]),
        bytes.fromhex(read["manifest"]),
        read["lost"],
    )
