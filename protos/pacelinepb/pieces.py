"""Long requests as several messages, for the coordinator takes none of more than 16 KiB.

gRPC holds an unfinished message of each open call in memory, and has one limit of size for a whole server.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import TypeVar

from google.protobuf.message import Message

__all__ = ["MESSAGE_BYTES", "cut", "in_messages"]

MESSAGE_BYTES = 16 << 10
"""Bytes of a message to the coordinator, at most."""

_HEAD_BYTES = 16
"""Of a piece in a message: its field's number and its length take fewer."""

M = TypeVar("M", bound=Message)


def cut(value: bytes) -> list[bytes]:
    """The value in pieces, each short enough for a message; one empty piece for an empty value."""
    most = MESSAGE_BYTES - _HEAD_BYTES
    return [value[at : at + most] for at in range(0, len(value), most)] or [b""]


def in_messages(request: M) -> list[M]:
    """Messages that give the request when they are merged in order.

    A message is longer than `MESSAGE_BYTES` only if one item, or what is not repeated, is too long by itself.
    """
    if request.ByteSize() <= MESSAGE_BYTES:
        return [request]
    head = type(request)()
    head.CopyFrom(request)
    messages = [head]
    for field, items in request.ListFields():
        if isinstance(items, MutableSequence):
            head.ClearField(field.name)
            for item in items:
                more = type(request)(**{field.name: [item]})
                if messages[-1].ByteSize() + more.ByteSize() > MESSAGE_BYTES:
                    messages.append(more)
                else:
                    messages[-1].MergeFrom(more)
    return messages
