"""The output of workers, as lines and as present states of unfinished lines. Pure.

A progress bar writes a carriage return and the line anew, many times a second. What follows the last one is the
*present state* of the line: a terminal shows it and replaces it, a file need not have it.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_LINE_BYTES = 64 << 10
"""Longer lines are passed on in pieces, so that a worker that never ends its line cannot fill the launcher's memory."""

_STREAMS = {"0": (), "1": ("stdout",), "2": ("stderr",), "3": ("stdout", "stderr")}
"""The streams that the numbers of -r and -t stand for, as in torchrun."""

_UP = b"\x1b[A"
"""Moves the cursor to the row above. tqdm writes it after each state of an inner bar, which is below the outer one."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A part of what a worker printed.

    `text` is what is to be seen, without its newline; the states of nested bars are one text of several lines. `ended`
    is False for the present state of a line that has not ended. `raw` is the bytes as they came, for a log file; empty
    if an earlier or a later part has them.
    """

    text: bytes
    ended: bool = True
    raw: bytes = b""


def present_state(line: bytes) -> bytes:
    """Returns what is to be seen of a line: what follows the last carriage return that something follows."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


class LineSplitter:
    """Splits a stream of bytes into lines; an incomplete line waits for its rest, but for its present state.

    A line that grows beyond `max_line_bytes` is passed on as it stands.
    """

    def __init__(self, max_line_bytes: int = _MAX_LINE_BYTES) -> None:
        self._limit = max_line_bytes
        self._partial = b""
        self._state: bytes | None = None  # what was last seen of the line, if it has states
        self._outer: bytes | None = None  # the state of the row above, while bars are nested

    def feed(self, data: bytes) -> list[Printed]:
        """Takes the next bytes; returns the lines that they complete, and the present state of the last one."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        found = [part for line in lines for part in self._line(line)]
        if self._state is not None or b"\r" in self._partial:
            state = self._see(self._partial)
            if len(self._partial) > self._limit:
                found.append(Printed(state, ended=False, raw=self._partial))
                self._partial = b""
            elif self._partial:
                found.append(Printed(state, ended=False))
        elif len(self._partial) > self._limit:
            found.append(Printed(self._partial, raw=self._partial))
            self._partial = b""
        return found

    @property
    def unended(self) -> bytes:
        """The visible text of the line that has not ended, below the outer bar if there is one."""
        state = present_state(self._partial) if self._state is None else self._state
        return b"\n".join(row for row in (self._outer, state) if row and row.strip())

    def finish(self) -> list[Printed]:
        """Returns the last line if the stream ended without a newline."""
        last, self._partial = self._partial, b""
        if not last and self._state is None and self._outer is None:
            return []
        *outer, line = self._end(last)
        return [*outer, Printed(line.text, ended=bool(line.text.strip()), raw=last)]  # it may be a bar that was wiped

    def _line(self, line: bytes) -> list[Printed]:
        if _UP in line:  # the newline only moves the cursor down, to the inner bar
            return [Printed(self._see(line), ended=False, raw=line + b"\n")]
        *outer, last = self._end(line)
        return [*outer, Printed(last.text, raw=line + b"\n")]

    def _end(self, line: bytes) -> list[Printed]:
        """Returns the line, after the last state of an outer bar if there is one."""
        outer, seen = self._outer, present_state(line) or self._state or b""
        self._state = self._outer = None
        return [*([Printed(outer)] if outer and outer.strip() else []), Printed(seen)]

    def _see(self, line: bytes) -> bytes:
        """Returns the present state of a line, below that of the outer bar."""
        lower, up, upper = line.rpartition(_UP)
        if up:
            self._outer = present_state(upper) or self._outer or b""
            self._state = present_state(lower.rpartition(_UP)[2])
        else:
            self._state = present_state(line) or self._state
        rows = [row for row in (self._outer, self._state) if row and row.strip()]
        return b"\n".join(rows)


@dataclass(frozen=True, slots=True)
class Streams:
    """Which lines are kept, and which are shown.

    If any are `kept`, the log files have all. `hidden` has pairs of a worker's index and "stdout" or "stderr", whose
    lines are kept but not shown.
    """

    kept: bool = False
    hidden: frozenset[tuple[int, str]] = frozenset()


def read_streams(redirects: str | None, tee: str | None, workers: int) -> Streams:
    """Parses -r and -t: 0 to 3 for all workers, or WORKER:0 to WORKER:3 with commas. -t shows what -r would hide."""
    hidden, shown = _pairs("-r/--redirects", redirects, workers), _pairs("-t/--tee", tee, workers)
    return Streams(bool(hidden or shown), frozenset(hidden - shown))


def _pairs(flag: str, text: str | None, workers: int) -> set[tuple[int, str]]:
    if text is None:
        return set()
    if text in _STREAMS:
        return {(index, stream) for index in range(workers) for stream in _STREAMS[text]}
    found = set()
    for item in text.split(","):
        index, colon, number = item.partition(":")
        if not (colon and index.isascii() and index.isdigit() and number in _STREAMS):
            raise ValueError(f"{flag} must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or 0:3,1:2,..., not {text!r}")
        found |= {(int(index), stream) for stream in _STREAMS[number]}
    return found
