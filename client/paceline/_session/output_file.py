"""The last lines that a worker has printed, in a file that its launcher writes and the worker reads.

A worker's streams are pipes to its launcher, which alone knows what went through them, also from code in C. The file
has no name: the worker inherits its descriptor. So it can tell an operator its last lines itself.

The file has two places, which the launcher fills in turn, each time by one write. A reader takes the newer one whose
checksum is right, so neither ever waits for the other, and a launcher that dies at a write leaves the text before.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress

from paceline._base.terminal import ESCAPES
from pacelinepb.debug.output_answers import readable

OUTPUT_FD = "PACELINE_OUTPUT_FD"
"""Variable that names the file's descriptor."""

MOST_LINES, MOST_BYTES = 50, 8 << 10
"""The most that is kept of a worker's output."""

MOST_OF_ENDED = 2_000
"""The most bytes of it that the coordinator is sent when the worker has ended (`ReportExitRequest.output`)."""

_HEAD = struct.Struct("<8sQII")
"""Mark, number of the write, length and CRC-32 of the text."""

_MARK = b"paceline"

_PLACE_BYTES = _HEAD.size + MOST_BYTES

_TRIES = 3
"""How often the file is read, if the launcher has written both places meanwhile."""

_ESCAPES = re.compile(ESCAPES)


class OutputFile:
    """The launcher's side: writes the file of one worker. Nothing here raises `OSError` but `__init__`."""

    def __init__(self) -> None:
        self.fd = _nameless()
        self._writes = 0
        self.write(b"")

    def write(self, text: bytes) -> None:
        """Replaces the text, of at most `MOST_BYTES`; the worker may have sealed or cut the file, which is its loss."""
        head = _HEAD.pack(_MARK, self._writes, len(text), zlib.crc32(text))
        with suppress(OSError):
            os.pwrite(self.fd, head + text, self._writes % 2 * _PLACE_BYTES)
        self._writes += 1

    def close(self) -> None:
        """Closes the launcher's descriptor."""
        with suppress(OSError):
            os.close(self.fd)


def _nameless() -> int:
    try:
        return os.memfd_create("paceline-output")
    except (AttributeError, OSError):  # not Linux, or a sandbox without it
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def own_output(environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Returns the last lines that this process has printed, or why they are not known."""
    fd = environment.get(OUTPUT_FD)
    if fd is None:
        return [], "its output is not kept: it was not started by paceline run"
    tries = _TRIES if fd.isascii() and fd.isdecimal() else 0
    text = next((text for _ in range(tries) if (text := _read(int(fd))) is not None), None)
    if text is None:
        return [], (
            f"its output cannot be read: the script, or a program between paceline run and it, has closed the "
            f"descriptor {fd[:20]} ({OUTPUT_FD})"
        )
    return readable_lines(text), ""


def _read(fd: int) -> bytes | None:
    """Reads the file; None if the descriptor is another file's by now, or closed."""
    found: list[tuple[int, bytes]] = []
    try:
        places = [os.pread(fd, _PLACE_BYTES, number * _PLACE_BYTES) for number in range(2)]
    except (OSError, OverflowError):
        return None
    for place in places:
        if len(place) >= _HEAD.size:
            mark, number, length, checksum = _HEAD.unpack_from(place)
            text = place[_HEAD.size : _HEAD.size + length]
            if mark == _MARK and len(text) == length and zlib.crc32(text) == checksum:
                found.append((number, text))
    return max(found)[1] if found else None


def readable_lines(text: bytes) -> list[str]:
    """Returns lines without what would control a terminal; bytes that are not UTF-8 are replaced.

    A sequence ends with its line at the latest: one whose end is missing must not hide what was printed after it.
    """
    lines = text.decode("utf-8", errors="replace").split("\n") if text else []
    return [readable(_ESCAPES.sub("", line)) for line in lines]


def newest_text(lines: Sequence[str], most: int = MOST_OF_ENDED) -> str:
    """Returns the last lines that fit into so many bytes of UTF-8; of a line that alone is too long, its end."""
    kept: list[str] = []
    left = most
    for line in reversed(lines):
        data = line.encode(errors="replace")
        left -= len(data) + 1
        if left < -1:
            if not kept:
                kept.append(data[-most:].decode(errors="ignore"))
            break
        kept.append(data.decode())
    return "\n".join(reversed(kept))
