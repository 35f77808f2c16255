"""The identity of a process, which distinguishes successive workers, and the request by which a worker joins a job."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from paceline._collectives.choose import RULES, Rules, rules_digest
from paceline._rpc import duration
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["is_gone", "JoinRequest", "process_identity"]

_START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1 (proc(5))


def process_identity(pid: int | None = None) -> pb.ProcessIdentity:
    """Returns the identity of this process, or of another one on this host.

    Args:
        pid: process id in this process's pid namespace; None for this process.

    Returns:
        The identity; without a boot id and with start time 0 if the system has no /proc or the process has ended.
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


def is_gone(other: pb.ProcessIdentity) -> bool:
    """True if that process ran on this host and has ended; False if it runs, or this process cannot know."""
    here = (_boot_id(), _pid_namespace())
    if not all(here) or here != (other.boot_id, other.pid_namespace) or not other.start_ticks:
        return False
    return _start_ticks(other.pid) != other.start_ticks


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
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The command's name (field 2) is in parentheses and may hold anything, spaces and parentheses too.
    after_name = stat.rpartition(")")[2].split()
    return int(after_name[_START_TIME_FIELD - 3])


class JoinRequest:
    """A worker's request to its job: the bounds of the world, or an explicit rank.

    Attributes:
        rules: how the job's members choose among schedules.
    """

    def __init__(self, job: str, min_workers: int, max_workers: int, rank: int | None, rules: Rules = RULES) -> None:
        self.job = job
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.rank = rank
        self.rules = rules

    def register(self, address: str, failure_timeout: float) -> pb.Register:
        """Returns the request that opens a session for this process.

        Args:
            address: where peers reach it.
            failure_timeout: seconds of silence after which this worker wants a member to count as lost.
        """
        return pb.Register(
            job=self.job,
            protocol_version=PROTOCOL_VERSION,
            process=process_identity(),
            address=address,
            settings=pb.JobSettings(
                min_workers=self.min_workers,
                max_workers=self.max_workers,
                failure_timeout=duration(failure_timeout),
                tuning=rules_digest(self.rules),
            ),
            rank=self.rank,
        )
