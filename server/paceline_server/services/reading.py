"""Refuses bytes that cannot be parsed, and fields that are too long, like any other bad request.

grpc ends a call whose message cannot be parsed with UNKNOWN and the text of a Python exception. Here parsing never
fails: it returns a mark in place of a message, and `check_readable` raises a refusal when it meets the mark. The bytes
have most likely changed on the way, so the caller may try again. Nothing acts on a message before `pacelinepb.bounds`
has passed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from paceline_server._grpc import EOF, aio
from paceline_server.errors import Damaged, LimitMet
from pacelinepb import checks
from pacelinepb.bounds import too_much
from pacelinepb.v1 import session_pb2 as pb

_TEXT = "the bytes of the request are not a message of this call"


class _Unreadable:
    """The mark that takes the place of a message."""


_UNREADABLE = _Unreadable()


def forgiving(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a parser like `parse` that gives a mark for unreadable bytes; `check_readable` knows the mark."""

    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _UNREADABLE

    return parse_or_mark


def check_readable(message: Any) -> Any:
    """Returns the message; raises `Damaged` if it could not be parsed, `LimitMet` if a field of it is too long."""
    if message is _UNREADABLE:
        raise Damaged(_TEXT)
    if text := too_much(message):
        raise LimitMet(text)
    return message


_read_session_request = forgiving(pb.SessionRequest.FromString)


class SessionMessages:
    """The messages of a session's stream; each message has a checksum, in both directions."""

    def __init__(self, context: aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self.peer, self.auth_context = context.peer, context.auth_context  # the audit asks who makes a refused call
        self._read = self._written = 0

    async def read(self) -> Any:
        """Reads the next message, or `EOF`; raises `Damaged` if it could not be parsed, or its checksum is wrong."""
        data: Any = await self._context.read()
        if data is EOF:
            return EOF
        if not checks.is_sound(data, self._read):
            raise Damaged("a message of the session was changed or lost on the way")
        self._read += 1
        return check_readable(_read_session_request(data))

    async def write(self, message: pb.SessionResponse) -> None:
        """Sends a message."""
        data = checks.with_check(message.SerializeToString(), self._written)
        self._written += 1
        await self._context.write(data)
