"""Which process on which machine: what tells one incarnation of a worker from the next."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pacelinepb.v1 import session_pb2 as pb

__all__ = ["is_gone", "process_identity"]

_START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1 (proc(5))


def process_identity(pid: int | None = None) -> pb.ProcessIdentity:
    """The identity of this process, or of another one on this host.

    Args:
        pid: process id in this process's pid namespace; None for this process.

    Returns:
        Boot id and start time are empty and 0 where the system has no /proc, or once the process is gone.
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
    """True if that process was on this host and is there no more; False if it is, or this process cannot know."""
    here = (_boot_id(), _pid_namespace())
    if not all(here) or here != (other.boot_id, other.pid_namespace) or not other.start_ticks:
        return False
    return _start_ticks(other.pid) != other.start_ticks


def _node() -> str:
    """Alike for processes that can share memory.

    They have one kernel; the socket over which they hand it over has a name that one network namespace knows; and what
    goes over it is for one user.
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
