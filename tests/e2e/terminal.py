"""A command on a terminal of its own: 80 columns, and keys that can be pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Terminal", "terminal"]

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command whose standard streams are a terminal.

    Args:
        arguments: of `paceline`.
        environment: variables on top of this process's own.
        size: rows and columns.
        background: True if a shell starts it there (&), and waits for it.
    """

    def __init__(
        self,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        size: tuple[int, int] = (40, 80),
        *,
        background: bool = False,
    ) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        clean |= {name: os.environ[name] for name in ("PACELINE_FLIGHT_DIR",) if name in os.environ}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            clean.pop(name, None)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        shell = ["sh", "-mc", '"$@" & wait $!', "sh"] if background else []
        self.process = subprocess.Popen(
            [*shell, sys.executable, "-m", "paceline", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=clean | {"TERM": "xterm-256color"} | environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that ^C reaches it
        )
        os.close(theirs)
        self._data = b""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def raw(self) -> str:
        """All that was written to the terminal so far."""
        return self._data.decode(errors="replace")

    @property
    def text(self) -> str:
        """The same without escape sequences."""
        return _ESCAPES.sub("", self.raw)

    def wait_for(self, words: str, timeout: float = 30.0) -> None:
        """Waits until some words were written, wherever the lines were broken."""
        wanted = "".join(words.split())
        with self._changed:
            found = self._changed.wait_for(lambda: wanted in "".join(self.text.split()) or self._ended(), timeout)
        assert found, f"no {words!r} in {timeout} s:\n{self.text[-4000:]}"
        assert wanted in "".join(self.text.split()), f"ended without {words!r}:\n{self.text[-4000:]}"

    def wait_for_match(self, pattern: str, timeout: float = 30.0) -> None:
        """Waits until a pattern is found in what was written, from which all white space is taken out."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._matches(pattern) or self._ended(), timeout)
        assert found, f"nothing like {pattern!r} in {timeout} s:\n{self.text[-4000:]}"
        assert self._matches(pattern), f"ended without {pattern!r}:\n{self.text[-4000:]}"

    def press(self, keys: str) -> None:
        """Types something; "\\x03" is Ctrl-C."""
        os.write(self._ours, keys.encode())

    def wait(self, timeout: float = 30.0) -> int:
        """Waits for the end; returns the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def close(self) -> None:
        """Kills it if it still runs."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        os.close(self._ours)

    def _matches(self, pattern: str) -> bool:
        return re.search(pattern, "".join(self.text.split())) is not None

    def _ended(self) -> bool:
        return not self._reader.is_alive()

    def _read(self) -> None:
        with suppress(OSError):  # Linux's answer once nobody has the terminal open
            while data := os.read(self._ours, 1 << 16):
                with self._changed:
                    self._data += data
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


@contextmanager
def terminal(
    *arguments: str, size: tuple[int, int] = (40, 80), background: bool = False, **environment: str
) -> Iterator[Terminal]:
    """`paceline ARGUMENTS` on a terminal, killed at the end of the block if it still runs."""
    running = Terminal(arguments, environment, size, background=background)
    try:
        yield running
    finally:
        running.close()
