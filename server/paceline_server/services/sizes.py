"""How long a request may be: a longer one is refused before it is parsed, for messages grow when they are parsed.

Half a million empty names are 1 MB on the wire, and 1.4 GiB behind it. grpc has one limit for all methods, that of the
longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from paceline_server.errors import LimitMet
from paceline_server.settings import ServerSettings

__all__ = ["TooLong", "bounded", "most_bytes"]

_STORE = "/pacelinepb.v1.StoreService"

_LONG = frozenset(f"{_STORE}/{method}" for method in ("Set", "CompareSet", "Wait"))
"""Those that carry values, and as many keys as one `Wait` may have."""


class TooLong(NamedTuple):
    """Stands where a message should be that was too long.

    Attributes:
        size: bytes that came.
        most: bytes that may come.
    """

    size: int
    most: int

    def refusal(self) -> LimitMet:
        """What its sender is told."""
        return LimitMet(f"a message of this call has at most {self.most:,} bytes, not {self.size:,}")


def most_bytes(settings: ServerSettings, method: str | None = None) -> int:
    """Bytes of a message, at most.

    Args:
        settings: the limits.
        method: full name of the method; None for the longest of all.
    """
    return settings.max_request_bytes + (settings.max_value_bytes if method is None or method in _LONG else 0)


def bounded(parse: Callable[[bytes], Any] | None, most: int) -> Callable[[bytes], Any]:
    """Parses like `parse` (None: not at all) what has at most `most` bytes; gives a `TooLong` for what has more."""

    def parse_or_mark(data: bytes) -> Any:
        if len(data) > most:
            return TooLong(len(data), most)
        return data if parse is None else parse(data)

    return parse_or_mark
