"""The check that each message of a session's stream ends with: a CRC-32 of its place in the stream and its bytes.

TCP's own checksum has 16 bits, and does not cover errors in a proxy or in bad memory. This check detects a message that
has changed on the way, was lost, or came twice; then the stream is closed and resumed like one that broke. The check is
the last field of the message (`SessionRequest.check`, `SessionResponse.check`), so that any protobuf library can read
the message. A message without a check counts as changed, too.
"""

from __future__ import annotations

import struct
import zlib

__all__ = ["is_sound", "with_check"]

_KEY = b"\xa5\x06"
"""The key of field 100 as a fixed32: 100 << 3 | 5 as a varint."""

_BYTES = len(_KEY) + 4


def with_check(data: bytes, place: int) -> bytes:
    """Returns the serialised message with its check.

    Args:
        data: the message without a check.
        place: the number of messages before it in the same direction of the same stream.
    """
    return data + _KEY + struct.pack("<I", _check(data, place))


def is_sound(data: bytes, place: int) -> bool:
    """Returns True if the serialised message ends with the right check for its place."""
    return data[-_BYTES:] == _KEY + struct.pack("<I", _check(data[:-_BYTES], place))


def _check(data: bytes, place: int) -> int:
    return zlib.crc32(data, place & 0xFFFFFFFF)
