"""Python processes for tests, started in milliseconds: forked from a process that has loaded Paceline (`fork_server`).

They have a pid, streams, environment, limit of files and cores of their own. What is read when the interpreter starts
or a module is loaded is the server's: where that matters, and where something is measured, they are started by the
interpreter (`fresh`).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from support.netns import Host

__all__ = ["ONE_THREAD", "Process", "PythonProcess", "fresh", "start_python"]

_SERVER = Path(__file__).with_name("fork_server.py")
_SERVERS = 2
"""With a seed for hashes each, so that workers do not all happen to order their sets alike."""

_MODULES = (
    "paceline._elastic.join",
    "paceline._elastic",
    "paceline._parallel",
    "paceline.checkpoint",
    "paceline.cli.app",
    "paceline.cli.coordinator",
    "paceline.cli.launcher.launcher",
    "paceline_server.app",
)
_TORCH_MODULES = ("paceline.torch.backend", "paceline.torch.ddp", "paceline.torch.fsdp")
"""Besides, where the tests have torch."""

_DYNAMO = ("torch._dynamo",) if find_spec("triton") is None else ()
"""Torch's first optimizer loads it: 1.5 s of a processor for each worker. It loads Triton if that is installed, which
complains of leaks when a forked process ends."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_fresh = False


class PythonProcess:
    """As `subprocess.Popen` with text, for what tests use of it. Any thread may wait.

    Attributes:
        stderr: None where it goes to a file.
    """

    def __init__(self, pid: int, pidfd: int, status: int, stdin: int, stdout: int, stderr: int | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self.stderr = None if stderr is None else os.fdopen(stderr)
        self._pidfd = pidfd
        self._status = status  # readable when it has ended, for ever
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._pidfd)
        os.close(self._status)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with self._lock:
            if self.returncode is None and self._has_ended(0.0):
                code = os.read(self._status, 16)
                if not code:
                    raise RuntimeError(f"nobody knows how pid {self.pid} ended: the process it was forked from is gone")
                self.returncode = int(code)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            TimeoutExpired: it still runs.
        """
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired([f"pid {self.pid}"], timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def _has_ended(self, timeout: float | None) -> bool:
        poller = select.poll()
        poller.register(self._status, select.POLLIN)
        return bool(poller.poll(None if timeout is None else max(0.0, timeout * 1000)))


Process: TypeAlias = PythonProcess | subprocess.Popen[str]


class _Server:
    """A process to fork from."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_SERVER), str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD},
            )
        atexit.register(self._close)

    def start(self, command: Sequence[str], environment: dict[str, str], stderr: int | None) -> PythonProcess:
        request = {
            "command": command,
            "environment": environment,
            "directory": os.getcwd(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "cores": sorted(os.sched_getaffinity(0)),
        }
        pipes = [os.pipe() for _ in range(3 if stderr is not None else 4)]
        (stdin, ours_in), (ours_out, stdout), (status, theirs), *rest = pipes
        (ours_error, error) = rest[0] if rest else (None, stderr)
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [stdin, stdout, error, theirs])
            answer, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
        if not answer:
            raise RuntimeError("the process to fork from has ended; what it wrote to stderr says why")
        (pidfd,) = fds
        for fd in (stdin, stdout, theirs, *([] if stderr is not None else [error])):
            os.close(fd)
        return PythonProcess(int(answer), pidfd, status, ours_in, ours_out, ours_error)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _servers(modules: tuple[str, ...]) -> Iterator[_Server]:
    return itertools.cycle([_Server(modules) for _ in range(_SERVERS)])


def start_python(
    command: Sequence[str],
    environment: Mapping[str, str | None],
    host: Host | None = None,
    *,
    stderr: int | None = None,
) -> Process:
    """Starts a process.

    Args:
        command: what follows the interpreter: `-c CODE`, `-m MODULE` or a script, and arguments.
        environment: variables on top of this process's own, None for one that is not to be there; arithmetic has one
            thread unless they say otherwise.
        host: of the test's network; None for this one.
        stderr: a file for standard error; a pipe by default.
    """
    given = {**os.environ, **ONE_THREAD, **environment}
    whole = {name: value for name, value in given.items() if value is not None}
    if _fresh or host is not None:
        words, pipe = [sys.executable, *command], subprocess.PIPE
        words = words if host is None else host.command(words)
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr or pipe, text=True, env=whole)
    modules = _MODULES + (_TORCH_MODULES + _DYNAMO if "torch" in sys.modules else ())
    return next(_servers(modules)).start(command, whole, stderr)


@contextmanager
def fresh() -> Iterator[None]:
    """Processes that are started meanwhile begin with nothing but the interpreter."""
    global _fresh
    before, _fresh = _fresh, True
    try:
        yield
    finally:
        _fresh = before
