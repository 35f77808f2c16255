"""On a system without shared memory everything can be imported, and says what is missing."""

from __future__ import annotations

import subprocess
import sys

ELSEWHERE = """
import asyncio, mmap, os, random, select, socket, sys
import numpy as np  # what is no part of the project knows what it runs on
for module, names in {
    os: "memfd_create eventfd eventfd_read eventfd_write posix_fallocate register_at_fork sched_yield MFD_CLOEXEC "
        "MFD_ALLOW_SEALING EFD_NONBLOCK EFD_CLOEXEC geteuid",
    select: "epoll poll POLLIN POLLHUP POLLERR EPOLLIN EPOLLET",
    socket: "AF_UNIX SCM_RIGHTS SO_PEERCRED MSG_CMSG_CLOEXEC SOCK_SEQPACKET",
    mmap: "MAP_SHARED PROT_READ PROT_WRITE",
}.items():
    for name in names.split():
        delattr(module, name)
import paceline
sys.modules["fcntl"] = None
from paceline._links.shm import arena, handover, incoming, outgoing, segment
from paceline.errors import LinkUnavailable
loop = asyncio.SelectorEventLoop.__new__(asyncio.SelectorEventLoop)
for call in (segment.check_available, lambda: handover.ShmHost(loop)):
    try:
        call()
    except LinkUnavailable as error:
        assert "has no memfd_create, eventfd, posix_fallocate, epoll, SCM_RIGHTS" in str(error), error
    else:
        raise AssertionError(call)
assert arena.arena().empty((1 << 20,), np.uint8).nbytes == 1 << 20
"""


def test_paceline_imports_without_shared_memory_and_names_missing_calls() -> None:
    run = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "no shared memory for an array" in run.stderr
