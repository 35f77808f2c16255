"""The coordinator of a notebook's workers, in a process of its own, because the notebook's process forks.

grpc does not survive a fork, so none may run in the process that is forked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.launch import Served, own_coordinator

_END_S = 15.0
"""Seconds for the coordinator to end; then it is told by SIGTERM, and leaves the file by which commands find it."""

_SETTLE_S = 5.0
"""The workers are forked one right after the other, so it is waited for all of them, as long as none dies."""


@contextmanager
def coordinator_process() -> Iterator[Served]:
    """Runs a coordinator for the duration of the block; RuntimeError if it does not start."""
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not (line := process.stdout.readline()):
                raise RuntimeError(f"the coordinator did not start: its process ended with code {process.wait()}")
            yield Served(*json.loads(line))
        finally:
            with suppress(BrokenPipeError):  # it has ended
                # A line, because a process that a worker has left behind may have a copy of the pipe.
                process.stdin.write(b"\n")
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.terminate()


def serve() -> None:
    """Tells where the coordinator listens, and runs it until a line comes, or the notebook's process ends."""
    with own_coordinator(settle_time=_SETTLE_S) as served:
        sys.stdout.write(f"{json.dumps([served.address, served.token])}\n")
        sys.stdout.flush()
        sys.stdin.readline()
