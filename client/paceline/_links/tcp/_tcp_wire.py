"""The format of a TCP half: each socket carries a hello, and then frames, which are distributed over all sockets.

A frame is a header of fixed length, the signature and the payload. With several sockets (streams) the payload is cut
into equal pieces, one for each stream, but none shorter than MIN_PIECE. So all streams carry a long frame together, and
one stream carries a short one. Frame k (from 0) starts with its header on stream k modulo the number of streams, and
its other pieces follow on the next streams, in a circle. So the headers alone tell what each stream carries.

A header contains two checksums: one of itself, checked before its lengths are used, and one of signature and payload.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.frame import MAX_FRAME_BYTES, Frame, FrameDamaged, FrameError, FrameKind, checksum
from paceline._links.kind import TICKET_BYTES
from paceline.config import MAX_STREAMS

MIN_PIECE = 64 << 10
"""Shortest piece in bytes: another system call costs as much as copying this many bytes."""

ACCEPTED = b"\x01"
"""The only answer to a hello. A caller that is not accepted gets no answer."""

_MAGIC = b"plTCP\x00\x02\n"  # name and version; the newline detects a path that converts line ends
_HELLO = struct.Struct(f"<8s{TICKET_BYTES}sBB")
HELLO_BYTES = _HELLO.size

_MARK = 0xA7  # the first field of every header
_HEAD = struct.Struct("<HHIIIQQ")
_CHECKSUM = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on each socket: it is stream `index` of the `streams` that the ticket admits."""

    ticket: bytes
    index: int
    streams: int


def encode_hello(hello: Hello) -> bytes:
    """Returns the hello as HELLO_BYTES bytes."""
    return _HELLO.pack(_MAGIC, hello.ticket, hello.index, hello.streams)


def decode_hello(data: bytes) -> Hello:
    """Returns the hello that `encode_hello` was given; raises FrameError if the bytes are none."""
    if len(data) != HELLO_BYTES:
        raise FrameError(f"{len(data)} bytes are not a hello")
    magic, ticket, index, streams = _HELLO.unpack(data)
    if magic != _MAGIC or not index < streams <= MAX_STREAMS:
        raise FrameError("the bytes are not a hello")
    return Hello(ticket, index, streams)


@dataclass(slots=True)
class Head:
    """A frame's header. `words` and `size` are the lengths of signature and payload in bytes.

    `checksum` covers signature and payload (`checksum_of`).
    """

    words: int
    size: int
    part: int
    generation: int
    operation: int
    checksum: int

    def to_frame(self, signature: bytes, payload: bytes | memoryview) -> Frame:
        """Returns the frame with this header."""
        return Frame(FrameKind.DATA, self.generation, self.operation, self.part, signature, payload)


def encode_head(frame: Frame) -> bytes:
    """Returns the header and the signature of a DATA frame. Reads the payload once.

    Raises FrameError for another frame, or if its signature or payload is too long.
    """
    if frame.kind is not FrameKind.DATA:
        raise FrameError(f"a frame of kind {frame.kind.name} belongs on the gRPC side of a link")
    words, size = len(frame.signature), len(frame.payload)
    if words > MAX_SIGNATURE_BYTES or words + size + HEAD_BYTES > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {words} + {size} bytes is above the limit of {MAX_FRAME_BYTES}")
    check = checksum_of(frame.signature, frame.payload)
    head = _HEAD.pack(_MARK, words, size, frame.part, check, frame.generation, frame.operation)
    return head + _CHECKSUM.pack(zlib.crc32(head)) + frame.signature


def checksum_of(signature: bytes, payload: bytes | memoryview) -> int:
    """Returns the checksum of the signature and the payload that follow a header."""
    return checksum(payload, zlib.crc32(signature))


def decode_head(data: memoryview) -> Head:
    """Returns the header that HEAD_BYTES bytes hold. Its lengths are within the limits.

    Raises:
        FrameDamaged: the checksum of the header is wrong.
        FrameError: the bytes are no header.
    """
    (own,) = _CHECKSUM.unpack_from(data, _HEAD.size)
    if zlib.crc32(data[: _HEAD.size]) != own:
        raise FrameDamaged("the checksum of a header is wrong")
    mark, words, size, part, check, generation, operation = _HEAD.unpack_from(data)
    if mark != _MARK:
        raise FrameError("the header does not belong to a frame")
    if words > MAX_SIGNATURE_BYTES or words + size + HEAD_BYTES > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {words} + {size} bytes is above the limit of {MAX_FRAME_BYTES}")
    return Head(words, size, part, generation, operation, check)


def cut(size: int, streams: int, number: int) -> list[tuple[int, int, int]]:
    """Returns which part of a payload goes on which stream, as (stream, begin, end). The stream of the header is first.

    The payload of `size` bytes belongs to frame `number`, from 0.
    """
    if streams == 1 or size <= MIN_PIECE:
        return [(number % streams, 0, size)]
    piece = max(MIN_PIECE, -(-size // streams))
    return [
        ((number + index) % streams, begin, min(begin + piece, size))
        for index, begin in enumerate(range(0, size, piece))
    ]
