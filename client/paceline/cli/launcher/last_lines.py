"""Keeps the last lines that a worker has printed, on both of its streams in the order in which they were read. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline._session.output_file import MOST_BYTES, MOST_LINES
from paceline.cli.launcher.printed import Printed

SHOWN_EVERY_S = 0.25
"""Least seconds between two writes for the worker, so that one which prints much costs its launcher nothing more."""


SHOWN_AFTER_S = 0.05
"""Seconds after which the worker is shown what it has printed: Python prints a line in pieces."""


class LastLines:
    """The lines, and when the worker is to be shown them: at the time `due`, None if there is nothing new."""

    def __init__(self) -> None:
        self.due: float | None = None
        self._lines: deque[bytes] = deque(maxlen=MOST_LINES)
        self._next = float("-inf")
        self._is_news = False

    def add(self, parts: Sequence[Printed]) -> None:
        """Takes what has been read, of which only the last lines are looked at; states that are replaced are none."""
        self._is_news = True
        last: list[bytes] = []
        for part in reversed(parts):
            if part.ended:
                last.append(part.text[-MOST_BYTES:])
                if len(last) == MOST_LINES:
                    break
        self._lines.extend(reversed(last))

    def text(self, unended: Sequence[bytes] = ()) -> bytes:
        """Returns the last lines, at most `MOST_BYTES`, with what is to be seen of lines that have not ended."""
        lines = [*self._lines, *filter(None, unended)][-MOST_LINES:]
        return b"\n".join(lines)[-MOST_BYTES:]

    def is_due(self, now: float) -> bool:
        """Says whether the worker is to be shown them now; it is asked at `due`, and each time that lines were read."""
        if self._is_news and self.due is None:
            self.due = max(now + SHOWN_AFTER_S, self._next)
        return self.due is not None and now >= self.due

    def shown(self, now: float) -> None:
        """Takes note that the worker was shown them."""
        self.due, self._is_news, self._next = None, False, now + SHOWN_EVERY_S
