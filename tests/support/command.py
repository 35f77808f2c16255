"""The command `paceline` as a real process, with a clear end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.python_process import ONE_THREAD, start_python

__all__ = ["NOT_JOINED", "SAID_WHEN_BUSY", "Command", "command", "gone", "script", "wait_until_gone"]

SAID_WHEN_BUSY = re.compile(
    r"paceline: job '.*': (?:waiting for \d+ more workers? |no coordinator answers at .* yet;)"
    r"|paceline: .*; for \d+ s now$"
    r"|paceline: .* joined or printed anything yet; imports may take a while$"
)
"""Lines about late workers, which a command writes only on a busy machine."""

NOT_JOINED = "paceline: no worker called paceline.join()"
"""How the last line of `paceline run` begins if all workers have run a script that looks for no others."""


class Command:
    """A running command; its output is read as it comes.

    Args:
        arguments: of `paceline`.
        environment: variables on top of this process's own.
        program: what Python runs in place of `paceline`.
    """

    def __init__(
        self, arguments: tuple[str, ...], environment: dict[str, str], program: tuple[str, ...] = ("-m", "paceline")
    ) -> None:
        kept = "PACELINE_FLIGHT_DIR"  # the tests' own
        ours = [name for name in os.environ if name.startswith("PACELINE_") and name != kept]
        clean = dict.fromkeys(ours) | {name: os.environ.get(name) for name in ONE_THREAD}
        self.process = start_python([*program, *arguments], {**clean, **environment})
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._changed = threading.Condition()
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._lines]
        for reader in self._readers:
            reader.start()

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return "".join(self._lines["stdout"])

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return "".join(self._lines["stderr"])

    @property
    def complaints(self) -> str:
        """Standard error so far, without what is said only on a busy machine."""
        return "".join(
            line for line in self._lines["stderr"] if not (SAID_WHEN_BUSY.match(line) or line.startswith(NOT_JOINED))
        )

    def wait_for(self, words: str, count: int = 1, timeout: float = 30.0) -> None:
        """Waits until the output holds some words, so often."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: (self.stdout + self.stderr).count(words) >= count or self.process.poll() is not None, timeout
            )
            assert found, f"no {words!r} in {timeout} s:\n{self}"
        if self.process.poll() is not None:  # what it has said may not have been read yet
            for reader in self._readers:
                reader.join(timeout)
        assert (self.stdout + self.stderr).count(words) >= count, f"ended without {words!r}:\n{self}"

    def signal(self, signum: signal.Signals) -> None:
        """Sends a signal to the command, and to nobody else."""
        self.process.send_signal(signum)

    def wait(self, timeout: float = 45.0) -> int:
        """Waits for the end; returns the exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout} s:\n{self}") from None
        for reader in self._readers:
            reader.join(timeout)
        return code

    def close(self) -> None:
        """Kills it if it still runs."""
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def __str__(self) -> str:
        return f"--- stdout\n{self.stdout}--- stderr\n{self.stderr}"

    def _read(self, name: str) -> None:
        for line in getattr(self.process, name):
            with self._changed:
                self._lines[name].append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[Command]:
    """`paceline ARGUMENTS`, killed at the end of the block if it still runs."""
    running = Command(arguments, environment)
    try:
        yield running
    finally:
        running.close()


def gone(pid: int) -> bool:
    """True if there is no such process, or only its corpse."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def wait_until_gone(pids: list[int], timeout: float = 20.0) -> None:
    """Waits for processes that are no children of this one."""
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if not gone(pid)]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.01)


@contextmanager
def script(path: Path, *arguments: str, **environment: str) -> Iterator[Command]:
    """A Python script as `command` runs `paceline`."""
    running = Command(arguments, environment, (str(path),))
    try:
        yield running
    finally:
        running.close()
