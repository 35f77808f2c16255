"""Coordinators as processes, among them one that is killed and started again at one address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.ports import free_port
from support.python_process import Process, start_python

__all__ = ["CoordinatorProcess", "coordinator_process", "server_process"]

_SERVE = """
import sys
PLANT
from paceline_server.__main__ import main
sys.exit(main())
"""


class CoordinatorProcess:
    """A coordinator with a state file, which is killed and started again.

    Args:
        folder: for its state and its log.
        plant: code that breaks it.

    Attributes:
        address: where it listens, again and again.
    """

    def __init__(self, folder: Path, plant: str = "") -> None:
        self.address = f"127.0.0.1:{free_port()}"
        code = _SERVE.replace("PLANT", plant)
        self._command = ["-c", code, "--listen", self.address, "--state", str(folder / "state.db")]
        self._log = (folder / "coordinator.log").open("wb")
        self._process: Process = start_python(self._command, {}, stderr=self._log.fileno())

    def start(self) -> None:
        """Starts it again."""
        self._process = start_python(self._command, {}, stderr=self._log.fileno())

    def kill(self) -> None:
        """Kills it, and waits for its end."""
        self._process.kill()
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def close(self) -> None:
        """Kills it for good."""
        self.kill()
        self._log.close()


@contextmanager
def coordinator_process(folder: Path, plant: str = "") -> Iterator[CoordinatorProcess]:
    """A coordinator for the block."""
    started = CoordinatorProcess(folder, plant)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def server_process(*arguments: str, stderr: int | None = None) -> Iterator[Process]:
    """`python -m paceline_server`, killed at the end of the block if it still runs.

    Args:
        arguments: its own.
        stderr: a file for standard error; a pipe by default.
    """
    started = start_python(["-m", "paceline_server", *arguments], {}, stderr=stderr)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        for pipe in (started.stdin, started.stdout, started.stderr):
            if pipe is not None:
                pipe.close()
