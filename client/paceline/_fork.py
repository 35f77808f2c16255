"""What a forked child does so that peers still notice its parent's death.

A child inherits the parent's sockets and holds them open: peers and the coordinator would notice the parent's SIGKILL
only when the child ends. So the child points the inherited sockets of sessions at /dev/null (dup2, not close: grpc's
own tables still refer to the numbers). It finds them by their endpoints, and leaves a user's own sockets alone.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from paceline.errors import ForkedSession

__all__ = ["Endpoints", "check_process", "protect"]

Endpoints = set[tuple[str, int]]
"""(IP, port) pairs."""

_lock = threading.Lock()
_listening: dict[int, int] = {}
_dialled: dict[int, Endpoints] = {}
_registered = False


_forked = False


def check_process() -> None:
    """Checks that this is the process that joined, not a forked child of it.

    Raises:
        ForkedSession: this process was forked from one that has joined.
    """
    if _forked:
        raise ForkedSession(
            "this process was forked from one that has joined a job: the session belongs to the parent, and grpc does "
            "not survive a fork. Use the session in the parent only, or start the child with the 'spawn' method and "
            "let it join for itself"
        )


def protect(key: int, *, listening_port: int, dialled: Endpoints) -> None:
    """Registers the sockets of a session for a child to close, or changes what was registered.

    Args:
        key: identifies the session.
        listening_port: the port that its peers dial; 0 forgets the session.
        dialled: endpoints that the session dials: coordinator and peers.
    """
    global _registered
    with _lock:
        if not listening_port:
            _listening.pop(key, None)
            _dialled.pop(key, None)
            return
        _listening[key] = listening_port
        _dialled[key] = set(dialled)
        if not _registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_in_child)
            _registered = True


def _after_in_child() -> None:
    global _forked
    _forked = True
    ports, dialled = set(_listening.values()), set().union(*_dialled.values())
    _listening.clear()
    _dialled.clear()
    _lock.release()
    if not ports:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in Path("/proc/self/fd").iterdir():
        if _belongs(int(entry.name), ports, dialled):
            os.dup2(null, int(entry.name), inheritable=False)
    os.close(null)


def _belongs(fd: int, ports: set[int], dialled: Endpoints) -> bool:
    try:
        probe = socket.socket(fileno=fd)
    except OSError:  # not a socket, or the descriptor that lists this folder
        return False
    try:
        if probe.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if probe.getsockname()[1] in ports:
            return True
        host, port = probe.getpeername()[:2]
        return (host.removeprefix("::ffff:"), port) in dialled
    except OSError:  # not connected
        return False
    finally:
        probe.detach()
