"""torchrun's -r/--redirects and -t/--tee: whose lines are kept in files, and whose are shown. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Streams", "read_streams"]

_STREAMS = {"0": (), "1": ("stdout",), "2": ("stderr",), "3": ("stdout", "stderr")}
"""torchrun's numbers for them."""


@dataclass(frozen=True, slots=True)
class Streams:
    """What becomes of lines.

    Attributes:
        kept: True if any are asked to be kept: the log files then have all.
        hidden: pairs of a worker's index and "stdout" or "stderr": kept, but not shown.
    """

    kept: bool = False
    hidden: frozenset[tuple[int, str]] = frozenset()


def read_streams(redirects: str | None, tee: str | None, workers: int) -> Streams:
    """Reads the two flags: 0 to 3 for all workers, or WORKER:0 to 3 with commas. What is shown by -t is not hidden.

    Raises:
        ValueError: one of them is neither.
    """
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
            raise ValueError(f"{flag} is 0 (none), 1 (stdout), 2 (stderr), 3 (both), or 0:3,1:2,..., not {text!r}")
        found |= {(int(index), stream) for stream in _STREAMS[number]}
    return found
