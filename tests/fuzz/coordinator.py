"""The coordinator: requests of workers as they are checked, what is stored of them, and the file that holds it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from google.protobuf.message import DecodeError

from fuzz.wire import pack_chunks, unpack_chunks
from paceline_protocol import OURS, Ending, Seat, Verdict, View
from paceline_protocol._versions import spoken_by
from paceline_protocol.translation import check_number, write_process, write_verdict
from paceline_server import wire
from paceline_server.errors import Refused
from paceline_server.key_values import KeyValues
from paceline_server.limits import Budget
from paceline_server.settings import ServerSettings
from paceline_server.storage import schema
from paceline_server.storage.base import (
    AnswerKept,
    Change,
    EndingStored,
    KeySet,
    StateUnusable,
    StoredJob,
    VerdictStored,
    ViewFormed,
)
from paceline_server.storage.checks import check_job
from paceline_server.storage.sqlite import SqliteStorage
from pacelinepb.bounds import too_much
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["SEEDS", "requests", "state_file", "storage"]

_SETTINGS = ServerSettings()


def requests(data: bytes) -> None:
    """A message of a session is refused, or read as what can be written again."""
    try:
        message = pb.SessionRequest.FromString(data)
    except DecodeError:
        return  # grpc refuses it
    if too_much(message):
        return
    try:
        _read(message)
    except Refused:
        return


def _read(message: pb.SessionRequest) -> None:
    match message.WhichOneof("event"):
        case "register":
            assert wire.read_versions(message.register).overlap(OURS)
            name = wire.read_job_name(message.register.job, _SETTINGS)
            assert 1 <= len(name.encode()) <= _SETTINGS.max_name_bytes
            process = wire.read_process(message.register.process, _SETTINGS)
            assert wire.read_process(write_process(process), _SETTINGS) == process
            settings = wire.read_settings(message.register.settings, _SETTINGS)
            again = wire.read_settings(wire.write_settings(settings), _SETTINGS)
            assert abs(again.failure_timeout - settings.failure_timeout) < 1e-6
        case "heartbeat":
            for now in (0.0, 1e6):
                progress = wire.read_progress(now, message.heartbeat)
                counters = wire.read_counters(message.heartbeat)
                assert len(counters.sent_bytes) <= 8
                assert len(progress.doing.encode()) <= 64
                told = wire.write_progress(now, progress, counters)
                assert (told.samples, dict(told.sent_bytes)) == (counters.samples, dict(counters.sent_bytes))
                assert (told.operation, told.inside) == (message.heartbeat.operation, message.heartbeat.inside)
        case "report":
            report = wire.read_report(message.report, _SETTINGS)
            assert len(report.text.encode()) <= _SETTINGS.max_text_bytes
            verdict = Verdict(1, report.reason, (0,), report.operation, report.text)
            assert pb.Verdict.FromString(write_verdict(verdict).SerializeToString()).text == report.text
        case "enter_barrier":
            wire.check_name(message.enter_barrier.name, "the name", _SETTINGS.max_barrier_name_bytes)
            assert wire.from_duration(message.enter_barrier.timeout, "the timeout") >= 0.0
        case "leave":
            assert len(wire.cut(message.leave.cause, _SETTINGS.max_text_bytes).encode()) <= _SETTINGS.max_text_bytes


def storage(data: bytes) -> None:
    """What has passed the checks can be stored, and comes back as it was: one job, from its members' messages."""
    job = StoredJob("job")
    changes: list[Change] = []
    values = KeyValues(job.name, _SETTINGS, Budget(1 << 30), {})
    for chunk in unpack_chunks(data):
        try:
            message = pb.SessionRequest.FromString(chunk)
            if too_much(message):
                continue
            changes += _changes(job, message, values)
        except (DecodeError, Refused):
            continue
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        schema.prepare(connection)
        for change in changes:
            schema.apply(connection, change)
        found = schema.load(connection)
    assert found == ([job] if changes else [])
    for each in found:
        check_job(each)


def _changes(job: StoredJob, message: pb.SessionRequest, values: KeyValues) -> list[Change]:
    """What a message would have stored; `job` is changed likewise."""
    match message.WhichOneof("event"):
        case "register":
            register = message.register
            process = wire.read_process(register.process, _SETTINGS)
            where = wire.check_name(register.address, "the address", _SETTINGS.max_address_bytes)
            if register.generation_floor >= 1 << 62:  # refused by the dispatcher
                return []
            settings = wire.read_settings(register.settings, _SETTINGS)
            if settings.replica_size > 1:  # one seat is no whole replica
                return []
            seat = Seat(0, "member-0", process, where, wire.token_hash(b""), 1)
            versions = spoken_by([wire.read_versions(register)])
            job.generation = max(job.generation, register.generation_floor) + 1
            job.view = View(job.generation, settings, register.HasField("rank"), (seat,), versions)
            job.verdict, job.endings = None, {}
            return [ViewFormed(job.name, job.view)]
        case "report" if job.view is not None:
            report = wire.read_report(message.report, _SETTINGS)
            culprits = (0,) if report.accused == 0 else ()  # the membership refuses ranks outside the view
            job.verdict = Verdict(job.generation, report.reason, culprits, report.operation, report.text)
            return [VerdictStored(job.name, job.verdict)]
        case "heartbeat" if (
            job.view is not None
        ):  # a member that leaves over an error: the operation is its heartbeat's
            progress = wire.read_progress(0.0, message.heartbeat)
            raised = ErrorReason.ERROR_REASON_PEER_RAISED
            job.verdict = Verdict(job.generation, raised, (0,), progress.operation, "it raised")
            return [VerdictStored(job.name, job.verdict)]
        case "leave" if job.view is not None:
            job.endings[0] = Ending(wire.cut(message.leave.cause, _SETTINGS.max_text_bytes), orderly=False)
            return [EndingStored(job.name, job.generation, 0, job.endings[0])]
        case "enter_barrier" if job.view is not None:  # stands for a write to the store: a name and a number
            key = wire.check_name(message.enter_barrier.name, "a key", _SETTINGS.max_key_bytes)
            call = check_number(message.enter_barrier.call, "call")
            _, changes = values.add("member-0", call, key, message.enter_barrier.timeout.seconds)
            for change in changes:
                if isinstance(change, KeySet):
                    job.keys[change.key] = change.value
                elif isinstance(change, AnswerKept):
                    job.answers.setdefault(change.member_id, {})[change.slot] = (change.call, change.answer)
            return changes
    return []


def state_file(data: bytes) -> None:
    """A file that is not one of ours, or was damaged, is refused as such; a coordinator never hangs over it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        path.write_bytes(data)
        with contextlib.suppress(StateUnusable):
            assert all(isinstance(job, StoredJob) for job in asyncio.run(_load(path)))


async def _load(path: Path) -> list[StoredJob]:
    state = SqliteStorage(path)
    async with asyncio.timeout(2.0):
        jobs = await state.load()
    await state.close()
    return jobs


def _messages() -> list[pb.SessionRequest]:
    register = pb.Register(
        job="job",
        protocol_version=OURS.oldest,
        newest_protocol_version=OURS.newest,
        process=pb.ProcessIdentity(host="host-a", pid=7, boot_id="b00t", start_ticks=99),
        address="127.0.0.1:7401",
        settings=pb.JobSettings(min_workers=2, max_workers=2),
        rank=1,
        generation_floor=3,
    )
    register.settings.failure_timeout.seconds = 3
    beat = pb.Heartbeat(operation=7, inside=True, committed=6, samples=96, sent_bytes={"shm": 1 << 20}, doing="barrier")
    beat.since.FromMilliseconds(1500)
    far = pb.Heartbeat(operation=2**64 - 1)
    far.since.seconds = 2**63 - 1
    lost = ErrorReason.ERROR_REASON_PEER_LOST
    enter = pb.EnterBarrier(call=1, generation=4, name="epoch", round=2)
    enter.timeout.seconds = 60
    damaging = pb.Register()
    damaging.CopyFrom(register)
    damaging.protocol_version = 0
    return [
        pb.SessionRequest(register=register),
        pb.SessionRequest(heartbeat=beat),
        pb.SessionRequest(enter_barrier=enter),
        pb.SessionRequest(report=pb.Report(generation=4, operation=7, reason=lost, accused=0, text="lost rank 0")),
        pb.SessionRequest(leave=pb.Leave(cause="ValueError: no")),
        pb.SessionRequest(heartbeat=far),
        pb.SessionRequest(report=pb.Report(operation=2**63, reason=lost)),
        pb.SessionRequest(register=damaging),
    ]


def _storage_seeds() -> Sequence[bytes]:
    register, *others = (message.SerializeToString() for message in _messages())
    return [pack_chunks([register, *others[:4]]), *(pack_chunks([register, other]) for other in others)]


def _state_file_seeds() -> Sequence[bytes]:
    job, values = StoredJob("job"), KeyValues("job", _SETTINGS, Budget(1 << 30), {})
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("PRAGMA page_size = 512")  # a small file, for mistakes in it to matter
        schema.prepare(connection)
        empty = connection.serialize()
        for message in _messages()[:4]:
            for change in _changes(job, message, values):
                schema.apply(connection, change)
        damaged = connection.serialize()
        connection.execute("UPDATE job SET culprits = 'nobody'")
        return [empty, damaged, connection.serialize(), empty[:700], b""]


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "requests": lambda: [message.SerializeToString() for message in _messages()],
    "storage": _storage_seeds,
    "state_file": _state_file_seeds,
}
