"""The last rows of a terminal, which show the present states of workers' lines, such as progress bars. Pure.

Whole lines go above them: the rows are erased, the lines are written, and the rows are drawn again. So no worker's bar
disturbs the lines or bars of another.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

from rich.cells import cell_len, set_cell_size

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[@-~]|[\x00-\x1f\x7f-\x9f]")
"""Escape sequences and control characters: a row must take exactly one row."""

_MOST = 16
"""Most rows; a number stands for the others."""


class LiveRows:
    """The rows, by whose they are."""

    def __init__(self) -> None:
        self._states: dict[Hashable, tuple[str, Sequence[str]]] = {}
        self._drawn = 0

    def __bool__(self) -> bool:
        return bool(self._states)

    def show(self, whose: Hashable, prefix: str, rows: Sequence[str]) -> None:
        """Sets somebody's rows; none takes them away. `prefix` goes before each of them."""
        if rows:
            self._states[whose] = prefix, rows
        else:
            self._states.pop(whose, None)

    def erase(self) -> str:
        """Returns what erases the rows that are on the terminal; the cursor is then where the first one began."""
        drawn, self._drawn = self._drawn, 0
        return f"\x1b[{drawn}A\x1b[J" if drawn else ""

    def draw(self, columns: int, lines: int) -> str:
        """Returns what draws the rows, after they have been erased; the cursor is then below them.

        Rows longer than the terminal's `columns` are cut, and there are fewer rows than its `lines`.
        """
        most = max(1, min(_MOST, lines - 2))
        rows = [
            (prefix, _fit(row, columns - 1 - len(prefix))) for prefix, all_of in self._states.values() for row in all_of
        ]
        if len(rows) > most:
            rows[most - 1 :] = [("", f"and {len(rows) - most + 1} more")]
        self._drawn = len(rows)
        return "".join(f"{prefix}{row}\n" for prefix, row in rows)


def plain(text: str) -> str:
    """Returns a text without escape sequences and control characters."""
    return _CONTROL.sub("", text)


def _fit(row: str, width: int) -> str:
    shown = plain(row)
    return shown if cell_len(shown) <= width else set_cell_size(shown, max(0, width))
