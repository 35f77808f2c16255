"""Splits long requests into several messages, because the coordinator takes no message of more than 16 KiB.

gRPC holds an unfinished message of each open call in memory, and has one size limit for a whole server.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import TypeVar

from google.protobuf.message import Message

__all__ = ["MESSAGE_BYTES", "cut", "in_messages"]

MESSAGE_BYTES = 16 << 10
"""The most bytes of a message to the coordinator."""

_HEAD_BYTES = 16
"""Bytes that a piece has for its head; its field's number and its length take fewer."""

M = TypeVar("M", bound=Message)


def cut(value: bytes) -> list[bytes]:
    """Cuts the value into pieces, each short enough for a message; an empty value gives one empty piece."""
    most = MESSAGE_BYTES - _HEAD_BYTES
    return [value[at : at + most] for at in range(0, len(value), most)] or [b""]


def in_messages(request: M) -> list[M]:
    """Splits a request into messages that give the request again when they are merged in order.

    A message is longer than `MESSAGE_BYTES` only if one item, or all that is not repeated, is too long by itself.
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
