"""Converts what members say from protobuf, and what an operator is told to protobuf.

This module checks incoming messages once, before anything acts on them (I9): everything that the .proto comments call a
MUST. It decides nothing. What is wrong with a message raises `BadRequest`.
"""

from __future__ import annotations

import hashlib
import re

from google.protobuf.duration_pb2 import Duration

from paceline_protocol import (
    OURS,
    Counters,
    JobSettings,
    Process,
    Progress,
    Report,
    Versions,
)
from paceline_protocol.coordinator import Launch
from paceline_protocol.translation import check_number
from paceline_server.errors import BadRequest, VersionMismatch
from paceline_server.settings import ServerSettings
from paceline_server.storage.checks import MOST_VERSION
from pacelinepb import MOST_KINDS, MOST_LOGGED, MOST_NAME_BYTES, RELEASE
from pacelinepb.debug.output_answers import readable
from pacelinepb.v1 import session_pb2 as pb

_SHORTEST_FAILURE_TIMEOUT = 0.05

_CENTURY = 3.15e9
"""Seconds. Replaces all longer times, so that they fit into a Duration again (at most 10,000 years)."""

_FASTEST = 1e18
"""Samples per second. A member that says more has told nothing."""

_MOST_CORES = 1e6
"""Cores that a member can use. One that says more has told nothing."""

_TUNING = re.compile(r"([0-9a-f]{16})?")

_MOST_RANKS = 1 << 16

_ID = re.compile(r"[!-~]{0,64}")

_LONGEST_DOING, _LONGEST_PART = 64, 128

MOST_OUTPUT = 2_000
"""The most bytes of the last lines of a process that has ended."""

_KIND = re.compile(r"[a-z0-9_]{1,16}")
"""The name of a kind of link. Metrics have it as the value of a label."""


def token_hash(token: bytes) -> bytes:
    """Returns the hash of a session token; only the hash is kept."""
    return hashlib.sha256(token).digest()


def to_duration(seconds: float) -> Duration:
    """Converts seconds to a duration; below 0 counts as 0."""
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def from_duration(duration: Duration, name: str) -> float:
    """Converts a duration that was set to seconds."""
    if duration.seconds < 0 or not 0 <= duration.nanos < 1_000_000_000:
        raise BadRequest(f"{name} must be a duration of 0 s or more")
    return duration.seconds + duration.nanos * 1e-9


def check_name(text: str, what: str, limit: int) -> str:
    """Checks that a name is not empty, nor longer than `limit` bytes."""
    size = len(text.encode())
    if not 1 <= size <= limit:
        raise BadRequest(f"{what} must have 1 to {limit} bytes, not {size}")
    return text


def read_job_name(text: str, settings: ServerSettings) -> str:
    """Checks a job's name. Logs and terminals show it, so it must be printable."""
    check_name(text, "the name of a job", settings.max_name_bytes)
    if not text.isprintable():
        raise BadRequest(f"the name of a job must be printable, not {text!r}")
    return text


def read_versions(message: pb.Register | pb.Resume) -> Versions:
    """Reads which versions of the protocol a worker speaks; raises `VersionMismatch` if we speak none of them."""
    versions = Versions(message.protocol_version, message.newest_protocol_version or message.protocol_version)
    if not 0 < versions.oldest <= versions.newest <= MOST_VERSION:
        raise BadRequest(f"a worker cannot speak {versions.oldest} to {versions.newest} of the protocol")
    if not versions.overlap(OURS):
        raise VersionMismatch(
            f"the worker speaks {versions} of the protocol, and the coordinator ({RELEASE}) {OURS}: run workers and "
            "coordinators of one release, or of two that follow each other"
        )
    return versions


def cut(text: str, limit: int) -> str:
    """Cuts a text to `limit` bytes of UTF-8, and replaces characters that would control a terminal or a log."""
    text = "".join(character if character.isprintable() else " " for character in text[:limit])
    data = text.encode(errors="replace")
    return text if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "..."


def read_output(text: str) -> str:
    """Reads the last lines that a process printed: the end of them, of `MOST_OUTPUT` bytes."""
    return readable(text[-MOST_OUTPUT:]).encode(errors="replace")[-MOST_OUTPUT:].decode(errors="ignore")


def read_address(text: str, settings: ServerSettings) -> str:
    """Checks the address that a worker gives for its door."""
    check_name(text, "the address of a worker", settings.max_address_bytes)
    if not text.isprintable():
        raise BadRequest("the address of a worker must be printable")
    return text


def read_process(message: pb.ProcessIdentity, settings: ServerSettings) -> Process:
    """Reads the identity of a process."""
    check_name(message.host, "the name of a host", settings.max_address_bytes)
    names = (message.host, message.boot_id, message.node)
    if not all(map(str.isprintable, names)):
        raise BadRequest("the names in a process identity must be printable")
    if not message.pid:
        raise BadRequest("a process identity needs a pid")
    start, space = (
        check_number(message.start_ticks, "start_ticks"),
        check_number(message.pid_namespace, "pid_namespace"),
    )
    return Process(message.host, message.pid, message.boot_id, start, space, message.node)


def read_settings(message: pb.JobSettings, settings: ServerSettings) -> JobSettings:
    """Reads a job's settings. `paceline_protocol` checks whether min and max make sense."""
    if not message.HasField("failure_timeout"):
        raise BadRequest("settings.failure_timeout is required")
    timeout = from_duration(message.failure_timeout, "settings.failure_timeout")
    if not _SHORTEST_FAILURE_TIMEOUT <= timeout <= settings.max_silence:
        raise BadRequest(
            f"settings.failure_timeout must be {_SHORTEST_FAILURE_TIMEOUT:g} to {settings.max_silence:g} s at this "
            f"coordinator, not {timeout:g} s: set PACELINE_FAILURE_TIMEOUT to such a time, or start the coordinator "
            "with another --max-silence"
        )
    if not _TUNING.fullmatch(message.tuning):
        raise BadRequest("settings.tuning must be 16 hexadecimal digits, or empty")
    if (size := message.replica_size or 1) > _MOST_RANKS:
        raise BadRequest(f"a replica has at most {_MOST_RANKS} ranks, not {size}")
    return JobSettings(message.min_workers, message.max_workers, timeout, message.tuning, size)


def read_replica(message: pb.Register) -> str:
    """Reads the id of a worker's replica, empty if it is one alone."""
    if not _ID.fullmatch(message.replica_id):
        raise BadRequest("the id of a replica has at most 64 characters of ASCII, without spaces")
    return message.replica_id


def read_launch(message: pb.Register) -> Launch | None:
    """Reads which launcher started a worker beside others."""
    if not message.HasField("launch"):
        return None
    launch = message.launch
    if not read_launch_id(launch.id):
        raise BadRequest("a launch needs an id")
    if not 1 <= launch.workers <= _MOST_RANKS:
        raise BadRequest(f"a launch has 1 to {_MOST_RANKS} workers, not {launch.workers}")
    if not launch.HasField("patience"):
        raise BadRequest("launch.patience is required")
    return Launch(launch.id, launch.workers, from_duration(launch.patience, "launch.patience"))


def read_launch_id(text: str) -> str:
    """Reads the id of a launch, which may be empty."""
    if not _ID.fullmatch(text):
        raise BadRequest("the id of a launch has at most 64 characters of ASCII, without spaces")
    return text


def read_progress(now: float, message: pb.Heartbeat) -> Progress:
    """Reads a heartbeat and converts its durations to times on our clock."""
    since = message.since.seconds + message.since.nanos * 1e-9
    operation = check_number(message.operation, "heartbeat.operation")
    step = check_number(message.step, "heartbeat.step")
    step_age = message.step_since.seconds + message.step_since.nanos * 1e-9
    step_at = now - min(max(0.0, step_age), _CENTURY)
    doing = cut(message.doing, _LONGEST_DOING)
    return Progress(operation, now - min(max(0.0, since), _CENTURY), message.inside, step, step_at, doing)


def read_counters(message: pb.Heartbeat) -> Counters:
    """Reads the counters of a heartbeat."""
    if len(message.sent_bytes) > MOST_KINDS or not all(map(_KIND.fullmatch, message.sent_bytes)):
        raise BadRequest(
            f"heartbeat.sent_bytes has at most {MOST_KINDS} kinds of links; a name has 1 to 16 characters of "
            "a-z, 0-9 and _"
        )
    in_collectives = message.in_collectives.seconds + message.in_collectives.nanos * 1e-9
    checkpoint_time = message.checkpoint_time.seconds + message.checkpoint_time.nanos * 1e-9
    state_time = message.state_time.seconds + message.state_time.nanos * 1e-9
    return Counters(
        committed=check_number(message.committed, "heartbeat.committed"),
        undone=check_number(message.undone, "heartbeat.undone"),
        samples=check_number(message.samples, "heartbeat.samples"),
        sent_bytes={kind: check_number(size, "heartbeat.sent_bytes") for kind, size in message.sent_bytes.items()},
        in_collectives=min(max(0.0, in_collectives), _CENTURY),
        checkpoint_step=check_number(message.checkpoint_step, "heartbeat.checkpoint_step"),
        checkpoints=check_number(message.checkpoints, "heartbeat.checkpoints"),
        checkpoint_failures=check_number(message.checkpoint_failures, "heartbeat.checkpoint_failures"),
        checkpoint_time=min(max(0.0, checkpoint_time), _CENTURY),
        state_bytes=check_number(message.state_bytes, "heartbeat.state_bytes"),
        state_time=min(max(0.0, state_time), _CENTURY),
        speed=message.speed if 0 < message.speed < _FASTEST else 0.0,
        share=message.share if 0 < message.share <= 1 else 0.0,
        total=check_number(message.total, "heartbeat.total"),
        logged=_read_logged(message) if message.logged else {},
        cpu=message.cpu if 0 < message.cpu < _MOST_CORES else 0.0,
        memory=check_number(message.memory, "heartbeat.memory"),
        operations=check_number(message.operations, "heartbeat.operations"),
        part=cut(message.part, _LONGEST_PART) if message.part else "",
    )


def _read_logged(message: pb.Heartbeat) -> dict[str, float]:
    logged = message.logged
    if len(logged) > MOST_LOGGED or not all(1 <= len(name.encode()) <= MOST_NAME_BYTES for name in logged):
        raise BadRequest(f"heartbeat.logged has at most {MOST_LOGGED} names, each of 1 to {MOST_NAME_BYTES} bytes")
    return dict(logged)


def read_report(message: pb.Report, settings: ServerSettings) -> Report:
    """Reads a report; the membership fills in the reporter's rank."""
    accused = message.accused if message.HasField("accused") else None
    operation = check_number(message.operation, "report.operation")
    text = cut(message.text, settings.max_text_bytes)
    return Report(-1, message.reason, accused, operation, text, message.unopened)


def write_settings(settings: JobSettings) -> pb.JobSettings:
    """Converts settings to a message."""
    return pb.JobSettings(
        min_workers=settings.min_workers,
        max_workers=settings.max_workers,
        failure_timeout=to_duration(settings.failure_timeout),
        tuning=settings.tuning,
        replica_size=settings.replica_size,
    )


def write_progress(now: float, progress: Progress, counters: Counters | None = None) -> pb.Heartbeat:
    """Converts progress, and what the member has counted, to a message."""
    counters = counters or Counters()
    since = now - progress.since if progress.operation else 0.0
    step_since = now - progress.step_at if progress.step else 0.0
    return pb.Heartbeat(
        operation=progress.operation,
        since=to_duration(since),
        inside=progress.inside,
        step=progress.step,
        step_since=to_duration(step_since),
        committed=counters.committed,
        undone=counters.undone,
        samples=counters.samples,
        sent_bytes=counters.sent_bytes,
        in_collectives=to_duration(counters.in_collectives),
        doing=progress.doing if progress.inside else "",
        checkpoint_step=counters.checkpoint_step,
        checkpoints=counters.checkpoints,
        checkpoint_failures=counters.checkpoint_failures,
        checkpoint_time=to_duration(counters.checkpoint_time),
        state_bytes=counters.state_bytes,
        state_time=to_duration(counters.state_time),
        speed=counters.speed,
        share=counters.share,
        total=counters.total,
        logged=counters.logged,
        cpu=counters.cpu,
        memory=counters.memory,
        operations=counters.operations,
        part=counters.part,
    )
