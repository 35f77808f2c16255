"""Bytes from a pipe into whole lines. Knows nothing of pipes."""

from __future__ import annotations

__all__ = ["LineSplitter"]

_MAX_LINE_BYTES = 64 << 10
"""A longer line is passed on in pieces, so that a worker that never ends its line cannot fill the launcher's memory."""


class LineSplitter:
    """Cuts a stream of bytes at its newlines; what follows the last one waits for the rest of its line.

    Args:
        max_line_bytes: a line that grows beyond this is passed on as it stands.
    """

    def __init__(self, max_line_bytes: int = _MAX_LINE_BYTES) -> None:
        self._limit = max_line_bytes
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Takes the next bytes; returns the lines that they complete, without their ends."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > self._limit:
            lines.append(self._partial)
            self._partial = b""
        return [line.removesuffix(b"\r") for line in lines]

    def finish(self) -> list[bytes]:
        """The stream has ended: returns the last line if it had no end."""
        last, self._partial = self._partial, b""
        return [last] if last else []
