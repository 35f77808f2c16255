"""Point-to-point messages as frames, and back. Pure: it touches no link, no lock, no clock.

A message is the frames of one number: part 0 says "send tag=T dtype[shape]", and all parts carry segments. A message
that its sender gave up half-way is dropped when the next one begins. Memory is taken as bytes arrive, never because a
signature announces them (I9).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from paceline.arrays import Array, as_bytes, as_flat, native
from paceline.collectives.program import SEGMENT_BYTES
from paceline.links.frame import Frame, FrameKind
from paceline.signature import Signature

__all__ = ["Assembler", "Message", "to_frames"]


@dataclass(slots=True, eq=False)
class Message:
    """A message, whole or on its way.

    Attributes:
        source: rank that sent it.
        tag: its tag.
        dtype: of the array.
        shape: of the array.
        missing: bytes that have not arrived.
        payloads: what has arrived, in order.
    """

    source: int
    tag: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    missing: int
    payloads: list[bytes | memoryview] = field(default_factory=list)

    @property
    def weight(self) -> int:
        """Bytes that it takes here, with 1 KiB for itself, so that empty messages weigh something too."""
        return sum(map(len, self.payloads)) + 1024

    def unpack(self, result: Array) -> None:
        """Copies a whole message into a contiguous array of its dtype and shape."""
        target, at = as_bytes(result.reshape(-1)), 0
        for payload in self.payloads:
            target[at : at + len(payload)] = payload
            at += len(payload)


def to_frames(x: Array, tag: int, generation: int, number: int) -> Iterator[Frame]:
    """The frames of a message; their payloads are views of `x` where its layout allows.

    Raises:
        UnsupportedOp: the dtype cannot travel.
        LimitExceeded: the array is too large, or has too many dimensions.
    """
    signature = Signature("send", f"tag={tag}", native(x.dtype), x.shape).encode()
    data = as_bytes(as_flat(x))
    for part, at in enumerate(range(0, max(1, len(data)), SEGMENT_BYTES)):
        yield Frame(FrameKind.DATA, generation, number, part, signature, data[at : at + SEGMENT_BYTES])
        signature = b""


class Assembler:
    """Makes messages of the frames of one source, in the order in which they come."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._number = 0
        self._part = 0
        self._message: Message | None = None

    def add(self, frame: Frame) -> Message | None:
        """Takes the next frame; returns the message that it completes, if it does.

        Raises:
            ValueError: no right sender sends this frame now; the text says what is wrong.
        """
        if frame.part == 0:
            if frame.operation != self._number + 1:
                raise ValueError(f"message {frame.operation} where message {self._number + 1} was due")
            self._message = self._open(frame.signature)
            self._number, self._part = frame.operation, 0
        message = self._message
        if message is None or frame.operation != self._number or frame.part != self._part:
            raise ValueError(f"frame {frame.part} of message {frame.operation} out of order")
        due = min(SEGMENT_BYTES, message.missing)
        if len(frame.payload) != due:
            raise ValueError(f"{len(frame.payload)} bytes in frame {frame.part} where {due} were due")
        message.payloads.append(frame.payload)
        message.missing -= due
        self._part += 1
        if message.missing:
            return None
        self._message = None
        return message

    def _open(self, data: bytes) -> Message:
        signature = Signature.decode(data)
        name, _, tag = signature.detail.partition("=")
        if signature.kind != "send" or name != "tag" or not tag.isdecimal():
            raise ValueError(f"no message: {data[:80]!r}")
        if signature.dtype is None or signature.shape is None:
            raise ValueError(f"a message without an array: {data[:80]!r}")
        nbytes = prod(signature.shape) * signature.dtype.itemsize
        return Message(self._source, int(tag), signature.dtype, signature.shape, nbytes)
