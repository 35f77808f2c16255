"""Shows workers' lines on the terminal, each after its worker's rank, and keeps them in log files.

A separate thread writes to the terminal, so that a paused terminal (Ctrl-S) or a slow pager does not hold up training.
Lines that are not yet written wait in memory. Progress bars are in the terminal's last rows (`live_rows`); where the
output is no terminal, a bar is a line when it ends, and now and then before.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from paceline._base.terminal import ESCAPES, printable
from paceline.cli.launcher.live_rows import LiveRows, plain
from paceline.cli.launcher.notices import Notices
from paceline.cli.launcher.printed import Printed
from paceline.cli.launcher.worker import Worker
from paceline.launch._supervision import Exit

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red: distinct on dark and on light
_DIM, _RESET = "\x1b[2m", "\x1b[0m"

_ORDERS = re.compile(r"(?!\x1b\[[0-9;:]*m)" + ESCAPES)
"""Sequences that a terminal obeys, except for colours: those that move the cursor into others' lines, set the
window's title, write to the clipboard or reset the terminal."""

_STATE_S = 10.0
"""Seconds between two lines that show the present state of a line, where the output is no terminal."""

_REDRAW_S = 0.05
"""Seconds between two drawings of states."""


def prefixed(label: str, line: bytes, colour: bool) -> str:
    """Formats a line of the worker with this label. Bytes that are not UTF-8 are replaced."""
    text = _ORDERS.sub("", line.decode("utf-8", errors="replace"))
    if not colour:
        return f"[{label}] {text}\n"
    number = int(label.lstrip("#").partition(".")[0])
    # The reset at the end stops a colour that a worker left switched on from reaching other workers' lines.
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m[{label}]{_RESET} {text}{_RESET}\n"


class LogFiles:
    """Keeps one file per worker with all that it prints, unchanged; a worker's replacement continues its file.

    Lines of standard output and standard error are whole. A newline is added only where one of them goes on in the
    middle of a line of the other. The folder is made if it does not exist, and existing files are appended to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}
        self._unended: dict[int, str] = {}  # the stream whose line is not ended, by worker

    def write(self, worker: Worker, stream: str, raw: bytes) -> None:
        """Appends what a worker printed on a stream."""
        if not raw:
            return
        if worker.index not in self._files:
            self._files[worker.index] = (self._folder / f"worker-{worker.index}.log").open("ab", buffering=0)
        torn = self._unended.get(worker.index, stream) != stream
        self._files[worker.index].write(b"\n" + raw if torn else raw)
        if raw.endswith(b"\n"):
            self._unended.pop(worker.index, None)
        else:
            self._unended[worker.index] = stream

    def note(self, worker: Worker, text: str) -> None:
        """Appends a line of the launcher itself, marked with "#"."""
        self.write(worker, "", f"# {text}\n".encode(errors="replace"))  # text from a record may hold a lone surrogate

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()


class Console:
    """Shows a launcher's events as lines of text. No call blocks.

    The calls come from the launcher's thread. But `say` may also be called from the thread of a source that tells the
    workers to leave, at the same time.

    Lines of `hidden` pairs of a worker's index and a stream are kept in `logs` but not shown. Standard error and the
    launcher's own sentences go to `err`.
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
        no_colour = bool(os.environ.get("NO_COLOR"))  # https://no-color.org
        self._colour = {stream: stream.isatty() and not no_colour for stream in (self._out, self._err)}
        is_dumb = os.environ.get("TERM", "dumb") == "dumb"
        self._moves = {stream: stream.isatty() and not is_dumb for stream in (self._out, self._err)}
        self._logged: dict[int, int] = {}  # process id of the last worker in each log file
        self._waiting_for: object = None
        self._notices = Notices()
        self._pending: queue.SimpleQueue[_Shown | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="paceline-console", daemon=True)
        self._writer.start()

    def line(self, worker: Worker, stream: str, printed: Printed) -> None:
        """Shows and keeps a worker's line, or the present state of one."""
        target = self._out if stream == "stdout" else self._err
        if (worker.index, stream) not in self._hidden:
            whose, colour = (worker.index, stream), self._colour[target]
            if printed.ended:
                self._pending.put(_Shown(target, prefixed(worker.label, printed.text, colour), whose))
            else:
                rows = printed.text.decode(errors="replace").split("\n") if printed.text else []
                self._pending.put(_Shown(target, f"[{worker.label}] ", whose, rows))
        if (logs := self._log_of(worker)) is not None:
            logs.write(worker, stream, printed.raw)

    def record(self, worker: Worker, record: dict[str, Any]) -> None:
        """Shows what workers wait for and what they all say; writes a new rank to the log, before its next lines."""
        if (text := self._notices.read(worker.pid, record)) is not None:
            self.say(printable(text))
        if record.get("kind") == "waiting" and record.get("key") != self._waiting_for:
            self._waiting_for = record.get("key")  # all workers report it; once is enough
            self.say(printable(str(record.get("reason"))))
        logs = self._log_of(worker)
        if logs is not None and record.get("kind") == "view":
            member = "rank" if worker.position is None else "replica"
            view = f"{member} {record.get('rank')} of {record.get('world_size')}, generation {record.get('generation')}"
            logs.note(worker, view)

    def ended(self, worker: Worker, end: Exit, expected: bool) -> None:
        """Shows a failure, and writes to the log how a worker ended.

        It is expected with exit code 0, or if the worker was told to end, or if `say` has already reported it.
        """
        if not expected:
            self.say(str(end))
        if (logs := self._log_of(worker)) is not None:
            logs.note(worker, str(end))

    def say(self, text: str) -> None:
        """Shows a sentence of the launcher itself."""
        dim, reset = (_DIM, _RESET) if self._colour[self._err] else ("", "")
        self._pending.put(_Shown(self._err, f"{dim}paceline: {text}{reset}\n"))

    def show(self, line: str) -> None:
        """Shows a line of the command itself where workers' lines go."""
        self._pending.put(_Shown(self._out, f"{line}\n"))

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
        screen = _Screen(self._moves)
        while not screen.closed:
            batch = [self._pending.get()]
            while not self._pending.empty():
                batch.append(self._pending.get())
            screen.show(batch, time.monotonic())
            if screen.has_rows:
                time.sleep(_REDRAW_S)  # many bars are drawn together


class _Shown(NamedTuple):
    """One thing to show.

    `text` is a line, with its newline; for a state, its prefix. `whose` is the worker and its stream; None for the
    launcher. `rows` are those of the present state of a line; None for a line.
    """

    target: TextIO
    text: str
    whose: tuple[int, str] | None = None
    rows: list[str] | None = None


class _Screen:
    """Writes lines and states to two streams, which may be one terminal. Used by the console's thread alone.

    `moves` says for each stream whether it is a terminal whose cursor can be moved.
    """

    def __init__(self, moves: dict[TextIO, bool]) -> None:
        self.closed = False
        self._moves = moves
        self._live = LiveRows()
        self._last: TextIO | None = None
        self._gone: set[TextIO] = set()
        self._next: dict[tuple[int, str], float] = {}  # when the state of a line may be shown where nothing moves

    @property
    def has_rows(self) -> bool:
        """True while states are drawn."""
        return bool(self._live)

    def show(self, batch: Sequence[_Shown | None], now: float) -> None:
        """Shows some things, of which None is the last one ever; now is the time in seconds."""
        terminal = next((stream for stream in self._moves if self._moves[stream] and stream not in self._gone), None)
        if terminal is not None and (erased := self._live.erase()):
            self._put(terminal, erased)
        for shown in batch:
            if shown is None:
                self.closed = True
            elif shown.rows is None:
                self._put(shown.target, shown.text)
                if shown.whose is not None:
                    self._live.show(shown.whose, "", [])
                    self._next.pop(shown.whose, None)
            elif self._moves[shown.target]:
                self._live.show(shown.whose, shown.text, shown.rows)
            elif shown.whose is not None and shown.rows and now >= self._next.setdefault(shown.whose, now + _STATE_S):
                self._next[shown.whose] = now + _STATE_S
                self._put(shown.target, "".join(f"{shown.text}{plain(row)}\n" for row in shown.rows))
        if terminal is not None and self._live and not self.closed:
            size = _size_of(terminal)
            self._put(terminal, self._live.draw(size.columns, size.lines))
        for stream in self._moves.keys() - self._gone:
            self._guarded(stream, stream.flush)

    def _put(self, stream: TextIO, text: str) -> None:
        """Writes, after what was written to the other stream, because both may be one terminal."""
        if self._last not in (None, stream) and self._last not in self._gone:
            assert self._last is not None
            self._guarded(self._last, self._last.flush)
        self._last = stream
        if stream in self._gone:
            return
        try:
            self._guarded(stream, lambda: stream.write(text))
        except UnicodeEncodeError:  # the terminal's encoding lacks a character
            encoding = stream.encoding or "ascii"
            self._guarded(stream, lambda: stream.write(text.encode(encoding, "replace").decode(encoding)))

    def _guarded(self, stream: TextIO, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError:  # `| head` has read enough: training continues, and the log files have the rest
            self._gone.add(stream)


def _size_of(stream: TextIO) -> os.terminal_size:
    try:
        return os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return os.terminal_size((80, 24))
