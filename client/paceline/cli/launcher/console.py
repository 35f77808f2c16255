"""Shows workers' lines on the terminal, each after its worker's rank, and keeps them in log files.

A separate thread writes to the terminal, so that a paused terminal (Ctrl-S) or a slow pager does not hold up training.
Lines that are not yet written wait in memory.
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

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red: distinct on dark and on light
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


def prefixed(label: str, line: bytes, colour: bool) -> str:
    """Formats a worker's line for the terminal.

    Args:
        label: the rank, or "#index".
        line: the line without its newline; bytes that are not UTF-8 are replaced.
        colour: whether to show the prefix in the rank's colour.
    """
    text = line.decode("utf-8", errors="replace")
    if not colour:
        return f"[{label}] {text}\n"
    number = int(label.lstrip("#"))
    # The reset at the end stops a colour that a worker left switched on from reaching other workers' lines.
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m[{label}]{_RESET} {text}{_RESET}\n"


class LogFiles:
    """Keeps one file per worker with all its lines, unchanged; a worker's replacement continues its file.

    Args:
        folder: the folder, which is made if it does not exist; existing files are appended to.

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
        """Appends a line of the launcher itself, marked with "#"."""
        self.write(worker, f"# {text}".encode(errors="replace"))  # text from a record may hold a lone surrogate

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()


class Console:
    """Shows a launcher's events as lines of text (`LaunchListener`).

    Args:
        logs: log files that keep the lines too.
        hidden: pairs of a worker's index and a stream, whose lines are kept but not shown.
        out: where workers' standard output goes.
        err: where workers' standard error and the launcher's own sentences go.
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
        self._logged: dict[int, int] = {}  # process id of the last worker in each log file
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
        """Shows what workers wait for; writes a new rank to the log, before the lines that are printed under it."""
        if record.get("kind") == "waiting" and record.get("reason") != self._waiting_for:
            self._waiting_for = record.get("reason")  # all workers report it; once is enough
            self.say(str(self._waiting_for))
        logs = self._log_of(worker)
        if logs is not None and record.get("kind") == "view":
            view = f"rank {record.get('rank')} of {record.get('world_size')}, generation {record.get('generation')}"
            logs.note(worker, view)

    def ended(self, worker: Worker, end: Exit, expected: bool) -> None:
        """Shows a failure, and writes to the log how a worker ended."""
        if not expected:
            self.say(str(end))
        if (logs := self._log_of(worker)) is not None:
            logs.note(worker, str(end))

    def say(self, text: str) -> None:
        """Shows a sentence of the launcher itself."""
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
            except OSError:  # `| head` has read enough: training continues, and the log files have the rest
                gone.add(stream)
            except UnicodeEncodeError:  # the terminal's encoding lacks a character
                stream.write(text.encode(stream.encoding or "ascii", "replace").decode(stream.encoding or "ascii"))
        for stream in {self._out, self._err} - gone:
            stream.flush()
