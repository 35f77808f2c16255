"""Workers' lines on the terminal, each with its worker's rank before it, and in log files.

Writing is done by a thread of its own: a terminal that is paused (Ctrl-S) or a slow pager then holds up nobody's
training. What is not yet written waits in memory.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from paceline.cli.launcher.supervision import Exit
from paceline.cli.launcher.worker import Worker

__all__ = ["Console", "LogFiles", "prefixed"]

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red: told apart on dark and on light
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


def prefixed(label: str, line: bytes, colour: bool) -> str:
    """A worker's line as it is shown.

    Args:
        label: the rank, or "#index".
        line: without its end; bytes that are no UTF-8 are replaced.
        colour: whether to mark the prefix in the rank's colour.
    """
    text = line.decode("utf-8", errors="replace")
    if not colour:
        return f"[{label}] {text}\n"
    number = int(label.lstrip("#"))
    # The reset at the end keeps a colour that a worker leaves switched on from running into its neighbours' lines.
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m[{label}]{_RESET} {text}{_RESET}\n"


class LogFiles:
    """One file per worker with all its lines, as they were; whoever is started in its place goes on with its file.

    Args:
        folder: is made if it is not there; files in it are appended to.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}

    def write(self, worker: Worker, line: bytes) -> None:
        """Appends a line."""
        if worker.index not in self._files:
            self._files[worker.index] = (self._folder / f"worker-{worker.index}.log").open("ab", buffering=0)
        self._files[worker.index].write(line + b"\n")

    def note(self, worker: Worker, text: str) -> None:
        """Appends a line of the launcher's own, marked as such."""
        self.write(worker, f"# {text}".encode(errors="replace"))  # a record's words may hold half of a character

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()


class Console:
    """Shows what a launcher sees as lines of text (`LaunchListener`).

    Args:
        logs: where lines are kept too.
        hidden: pairs of a worker's index and a stream, whose lines are kept and not shown.
        out: for workers' standard output.
        err: for workers' standard error and the launcher's own sentences.
    """

    def __init__(
        self,
        logs: LogFiles | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        hidden: Collection[tuple[int, str]] = (),
    ) -> None:
        self._logs = logs
        self._hidden = frozenset(hidden)
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        plain = bool(os.environ.get("NO_COLOR"))  # https://no-color.org
        self._colour = {stream: stream.isatty() and not plain for stream in (self._out, self._err)}
        self._logged: dict[int, int] = {}  # whose lines each log file holds at its end, by process id
        self._waiting_for: object = None
        self._pending: queue.SimpleQueue[tuple[TextIO, str] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="paceline-console", daemon=True)
        self._writer.start()

    def line(self, worker: Worker, stream: str, line: bytes) -> None:
        """Shows and keeps a worker's line."""
        target = self._out if stream == "stdout" else self._err
        if (worker.index, stream) not in self._hidden:
            self._pending.put((target, prefixed(worker.label, line, self._colour[target])))
        if (logs := self._log_of(worker)) is not None:
            logs.write(worker, line)

    def record(self, worker: Worker, record: dict[str, Any]) -> None:
        """Shows what workers wait for; keeps in the log under which rank the lines that follow were printed."""
        if record.get("kind") == "waiting" and record.get("reason") != self._waiting_for:
            self._waiting_for = record.get("reason")  # each worker tells; once is enough
            self.say(str(self._waiting_for))
        logs = self._log_of(worker)
        if logs is not None and record.get("kind") == "view":
            view = f"rank {record.get('rank')} of {record.get('world_size')}, generation {record.get('generation')}"
            logs.note(worker, view)

    def ended(self, worker: Worker, end: Exit, expected: bool) -> None:
        """Shows a failure, and keeps how a worker ended."""
        if not expected:
            self.say(str(end))
        if (logs := self._log_of(worker)) is not None:
            logs.note(worker, str(end))

    def say(self, text: str) -> None:
        """Shows a sentence of the launcher's own."""
        dim, reset = (_DIM, _RESET) if self._colour[self._err] else ("", "")
        self._pending.put((self._err, f"{dim}paceline: {text}{reset}\n"))

    def close(self) -> None:
        """Waits until everything is written."""
        self._pending.put(None)
        self._writer.join()
        if self._logs is not None:
            self._logs.close()

    def _log_of(self, worker: Worker) -> LogFiles | None:
        if self._logs is not None and self._logged.get(worker.index) != worker.pid:
            self._logged[worker.index] = worker.pid
            self._logs.note(worker, f"pid {worker.pid}")
        return self._logs

    def _write(self) -> None:
        gone: set[TextIO] = set()
        while (item := self._pending.get()) is not None:
            stream, text = item
            if stream in gone:
                continue
            try:
                stream.write(text)
                if self._pending.empty():
                    stream.flush()
            except OSError:  # `| head` has read enough: the training goes on, and the log files have the rest
                gone.add(stream)
            except UnicodeEncodeError:  # the terminal's own encoding lacks a character
                stream.write(text.encode(stream.encoding or "ascii", "replace").decode(stream.encoding or "ascii"))
        for stream in {self._out, self._err} - gone:
            stream.flush()
