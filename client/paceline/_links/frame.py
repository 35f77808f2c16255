"""The frame, which is the unit that travels on every link, and its encoding.

On the wire a frame is the protobuf message `FramesRequest` (peer.proto) in one canonical form: every field is written,
in order, and lengths are padded varints. Header fields then lie at fixed offsets, so one `struct` call and one join
make a frame, and reading it does not copy the payload. `FramesRequest.FromString` reads it too; a test compares them.
A frame ends with a checksum of all bytes before it. The reader uses nothing but the lengths before it has checked that.

The checksum is CRC-32; a long payload is folded first. A payload of FOLDED bytes or more is cut into rows of COLUMNS
words of 64 bits. The rows are added up column by column, modulo 2^64. The CRC covers the sums, and the bytes after the
last whole row. Folding runs at 17 to 40 GB/s here. zlib's CRC-32 runs at 3.6 GB/s, at each end, which takes as long as
everything else that a frame costs over TCP.

Changes within the length of a row (4,072 bytes) are detected as well as by CRC-32 alone. Changes that are further apart
escape only if they cancel in each column. COLUMNS is a prime, so errors that occur once in each page or packet fall
into different columns.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from paceline._base.arrays import MAX_SIGNATURE_BYTES

MAX_FRAME_BYTES = (4 << 20) + 4096
"""Longest frame in bytes; the receiver refuses a longer one before it allocates memory."""

COLUMNS = 509
"""Words of a row."""

FOLDED = 64 << 10
"""Shortest payload in bytes that is folded; below this, folding takes as long as the CRC."""

# Tags of FramesRequest's fields 1 to 7: (field << 3) | wire type.
_KIND, _GENERATION, _OPERATION, _PART, _SIGNATURE, _PAYLOAD, _CHECKSUM = 0x08, 0x11, 0x19, 0x25, 0x2A, 0x32, 0x3D
_HEAD = struct.Struct("<BB BQ BQ BI BBB")
_TAIL = struct.Struct("<B5B")
_END = struct.Struct("<BI")
_CHECKSUM_TAG = bytes([_CHECKSUM])
_OVERHEAD = _HEAD.size + _TAIL.size + _END.size


class FrameKind(IntEnum):
    """The kinds of frames, with the numbers of peer.proto."""

    DATA = 1
    ABORT = 2
    CLOSE = 3
    LEAVE = 4


_KINDS = frozenset(FrameKind)


class FrameError(ValueError):
    """The bytes are not a frame."""


class FrameDamaged(FrameError):
    """A length or the checksum is wrong: bytes changed in transit."""


@dataclass(slots=True)
class Frame:
    """One frame.

    Attributes:
        kind: DATA; ABORT if the sender's generation has failed; CLOSE if nothing follows on this link; LEAVE if
            nothing follows on any link.
        generation: the generation that it acts on.
        operation: number of the operation within (generation, purpose), from 1.
        part: number of the frame within (operation, sender, receiver), from 0.
        signature: the operation in words; only part 0 has it.
        payload: elements as bytes. A sent payload is copied before `Link.send` returns.
    """

    kind: FrameKind
    generation: int
    operation: int
    part: int
    signature: bytes
    payload: bytes | memoryview


def checksum(payload: bytes | memoryview, before: int = 0) -> int:
    """Returns the checksum of a payload; `before` is the checksum of the bytes that precede it."""
    if len(payload) < FOLDED:
        return zlib.crc32(payload, before)
    rows = len(payload) // (8 * COLUMNS)
    words = np.frombuffer(payload, "<u8", rows * COLUMNS).reshape(rows, COLUMNS)
    sums = np.add.reduce(words, axis=0).astype("<u8", copy=False)
    return zlib.crc32(memoryview(payload)[rows * 8 * COLUMNS :], zlib.crc32(sums.data, before))


def encode(frame: Frame) -> bytes:
    """Returns the frame as one bytes object, with one copy of the payload; raises FrameError if it is too long."""
    words, size = len(frame.signature), len(frame.payload)
    if words > MAX_SIGNATURE_BYTES or size + words + _OVERHEAD > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {words} + {size} bytes is above the limit of {MAX_FRAME_BYTES}")
    head = _HEAD.pack(
        _KIND, frame.kind, _GENERATION, frame.generation, _OPERATION, frame.operation, _PART, frame.part,
        _SIGNATURE, words & 0x7F | 0x80, words >> 7,
    )  # fmt: skip
    tail = _TAIL.pack(
        _PAYLOAD,
        size & 0x7F | 0x80,
        size >> 7 & 0x7F | 0x80,
        size >> 14 & 0x7F | 0x80,
        size >> 21 & 0x7F | 0x80,
        size >> 28,
    )
    before = head + frame.signature + tail
    found = zlib.crc32(_CHECKSUM_TAG, checksum(frame.payload, zlib.crc32(before)))
    return b"".join((before, frame.payload, _END.pack(_CHECKSUM, found)))


def decode(data: bytes) -> Frame:
    """Returns the frame that the bytes hold; its payload is a view of them.

    Raises:
        FrameDamaged: the lengths do not add up, or the checksum is wrong.
        FrameError: the bytes are not a frame in canonical form.
    """
    if not _OVERHEAD <= len(data) <= MAX_FRAME_BYTES:
        raise FrameDamaged(f"{len(data)} bytes cannot be a frame")
    t1, kind, t2, generation, t3, operation, t4, part, t5, low, high = _HEAD.unpack_from(data)
    words = low & 0x7F | high << 7
    start, end = _HEAD.size + words + _TAIL.size, len(data) - _END.size
    if words > MAX_SIGNATURE_BYTES or start > end:
        raise FrameDamaged(f"a signature of {words} bytes does not fit a frame of {len(data)}")
    t6, b0, b1, b2, b3, b4 = _TAIL.unpack_from(data, _HEAD.size + words)
    size = b0 & 0x7F | (b1 & 0x7F) << 7 | (b2 & 0x7F) << 14 | (b3 & 0x7F) << 21 | b4 << 28
    if start + size != end:
        raise FrameDamaged("the length of the payload does not match that of the frame")
    t7, told = _END.unpack_from(data, end)
    payload = memoryview(data)[start:end]
    if zlib.crc32(data[end : end + 1], checksum(payload, zlib.crc32(data[:start]))) != told:
        raise FrameDamaged(f"the checksum of a frame of {len(data)} bytes is wrong")
    tags = (_KIND, _GENERATION, _OPERATION, _PART, _SIGNATURE, _PAYLOAD, _CHECKSUM)
    if (t1, t2, t3, t4, t5, t6, t7) != tags or low < 0x80 or high > 0x7F or min(b0, b1, b2, b3) < 0x80 or b4 > 0x7F:
        raise FrameError("the header does not belong to a frame")
    if kind not in _KINDS:
        raise FrameError(f"unknown kind of frame {kind}")
    return Frame(FrameKind(kind), generation, operation, part, data[_HEAD.size : _HEAD.size + words], payload)
