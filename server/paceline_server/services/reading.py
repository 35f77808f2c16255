"""Bytes that are no message of their kind: refused like any other bad request, not a failure inside of grpc.

grpc ends a call whose message cannot be parsed with UNKNOWN and the words of a Python exception. Here parsing never
fails; what could not be read is refused by whoever looks at it first, in the one place where refusals are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from paceline_server._grpc import aio
from paceline_server.errors import BadRequest

__all__ = ["ReadableContext", "check_readable", "forgiving"]


class _Unreadable:
    """Stands where a message should be."""


_UNREADABLE = _Unreadable()


def forgiving(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Parses like `parse`, and gives something to `check_readable` for what it cannot read."""

    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _UNREADABLE

    return parse_or_mark


def check_readable(message: Any) -> Any:
    """The message.

    Raises:
        BadRequest: it could not be parsed.
    """
    if message is _UNREADABLE:
        raise BadRequest("the bytes of the request are no message of this call")
    return message


class ReadableContext:
    """The context of a stream; what is read from it is a message, or the end."""

    def __init__(self, context: aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self.write = context.write

    async def read(self) -> Any:
        """The next message.

        Raises:
            BadRequest: it could not be parsed.
        """
        return check_readable(await self._context.read())
