"""The identity of a process, which distinguishes successive workers, and the request by which a worker joins a job."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from paceline._base.launcher_variables import LAUNCH
from paceline._base.rpc import duration
from paceline._collectives.choose import RULES, Rules, rules_digest
from paceline.errors import PacelineError
from paceline_protocol import OURS, Process
from pacelinepb.v1 import session_pb2 as pb

_LAUNCH = re.compile(r"[!-~]{1,64}:[0-9]{1,5}")

_PATIENCE = 0.75
"""The part of the time for joining in which the others of a launch are waited for."""

_STATE, _FLAGS, _THREADS, _START_TIME = 3, 9, 20, 22
"""Fields of /proc/PID/stat, counted from 1 (proc(5))."""

_DEAD = ("Z", "X", "x")
"""States of a process that runs no more. Its entry stays (Z) until its parent reaps it, and some parents never do."""

_EXITING = 4
"""PF_EXITING among the flags: the thread runs no code of its own any more, and gives back what it holds."""


def process_identity(pid: int | None = None) -> pb.ProcessIdentity:
    """Returns the identity of this process, or of another one that has this `pid` in the same pid namespace.

    It has no boot id and start time 0 if the system has no /proc or the process has ended.
    """
    pid = os.getpid() if pid is None else pid
    return pb.ProcessIdentity(
        host=socket.gethostname(),
        pid=pid,
        boot_id=_boot_id(),
        start_ticks=_start_ticks(pid),
        pid_namespace=_pid_namespace(),
        node=_node(),
    )


def is_gone(other: Process | pb.ProcessIdentity) -> bool:
    """True if that process ran on this host and has ended; False if it runs, or this process cannot know."""
    here = (_boot_id(), _pid_namespace())
    if not all(here) or here != (other.boot_id, other.pid_namespace) or not other.start_ticks:
        return False
    fields = _stat(other.pid)
    if fields is None:
        return not _exists(other.pid)
    if int(fields[_START_TIME]) != other.start_ticks:
        return True
    # While one of its threads runs, a process is a zombie only in name: its first thread has ended.
    return _is_over(fields) and (int(fields[_THREADS]) <= 1 or _all_over(Path(f"/proc/{other.pid}/task")))


def _node() -> str:
    """Returns a name that is the same for all processes that can share memory with each other.

    They have one kernel; they hand memory over through a socket whose name is known in one network namespace; and only
    one user may use that memory.
    """
    try:
        space = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""
    boot = _boot_id()
    return f"{boot}/{space}/{os.geteuid()}" if boot else ""


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields is not None else 0


def _exists(pid: int) -> bool:
    """Asks the kernel: /proc may hide the processes of other users (hidepid), and this one may have no file left."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_over(fields: Mapping[int, str]) -> bool:
    """True if a thread runs no code of its own any more. A GPU's driver may keep it in the kernel for seconds."""
    return fields[_STATE] in _DEAD or bool(int(fields[_FLAGS]) & _EXITING)


def _all_over(tasks: Path) -> bool:
    """True if all threads in a folder /proc/PID/task are over, and none has begun meanwhile."""
    try:
        threads = set(os.listdir(tasks))
        found = [_fields(tasks / thread / "stat") for thread in threads]
        return all(fields is None or _is_over(fields) for fields in found) and set(os.listdir(tasks)) <= threads
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _stat(pid: int) -> Mapping[int, str] | None:
    """Returns the fields of a process; see `_fields`."""
    return _fields(Path(f"/proc/{pid}/stat"))


def _fields(file: Path) -> Mapping[int, str] | None:
    """Returns the fields of a file `stat` from the third on, by their numbers; None if there is nothing to read."""
    try:
        stat = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name (field 2) is in parentheses and may hold anything, spaces and parentheses too.
    return dict(enumerate(stat.rpartition(")")[2].split(), start=_STATE))


class Replica(Protocol):
    """The place of a worker among the ranks of its replica, and what happens if one of them is lost."""

    position: int
    size: int
    id: str

    def end(self, error: PacelineError) -> None:
        """Ends this process soon; from any thread."""


def launch_of(environ: Mapping[str, str], join_timeout: float) -> pb.Launch | None:
    """Returns the launch that a worker belongs to; None if no launcher started it beside others.

    Raises:
        ValueError: the variable is malformed.
    """
    text = environ.get(LAUNCH)
    if not text:
        return None
    if not _LAUNCH.fullmatch(text):
        raise ValueError(f"{LAUNCH} must be ID:WORKERS, as `paceline run` sets it, not {text!r:.80}")
    name, _, workers = text.rpartition(":")
    return pb.Launch(id=name, workers=int(workers), patience=duration(_PATIENCE * join_timeout))


class JoinRequest:
    """A worker's request to its job: the bounds of the world, or an explicit rank; and its place in its replica."""

    mates: Replica | None = None
    launch: pb.Launch | None = None
    """Its launcher's run, whose other workers the first view waits for; None if it was started alone."""

    def __init__(self, job: str, min_workers: int, max_workers: int, rank: int | None, rules: Rules = RULES) -> None:
        self.job = job
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.rank = rank
        self.rules = rules

    def register(self, address: str, failure_timeout: float) -> pb.Register:
        """Returns the request that opens a session for this process."""
        mates = self.mates if self.mates is not None and self.mates.size > 1 else None
        return pb.Register(
            job=self.job,
            protocol_version=OURS.oldest if mates is None else OURS.newest,  # others would overlook the replica
            newest_protocol_version=OURS.newest,
            process=process_identity(),
            address=address,
            settings=pb.JobSettings(
                min_workers=self.min_workers,
                max_workers=self.max_workers,
                failure_timeout=duration(failure_timeout),
                tuning=rules_digest(self.rules),
                replica_size=0 if mates is None else mates.size,
            ),
            rank=self.rank,
            replica_id="" if mates is None else mates.id,
            position=0 if mates is None else mates.position,
            launch=self.launch,
        )
