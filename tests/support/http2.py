"""Just enough of HTTP/2 (RFC 9113) and gRPC's framing to say by hand what no library would say."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

from google.protobuf.message import Message

__all__ = [
    "CONTINUATION",
    "DATA",
    "END_HEADERS",
    "END_STREAM",
    "HEADERS",
    "PING",
    "PREFACE",
    "RST_STREAM",
    "SETTINGS",
    "WINDOW_UPDATE",
    "call_headers",
    "claimed",
    "connect",
    "frame",
    "framed",
    "inflated",
    "open_call",
    "referred",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_HEADERS, END_STREAM = 4, 1

_MOST_IN_A_FRAME = 1 << 14
_CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """A frame; `length` is what it claims, if not the truth."""
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def call_headers(method: str | bytes, more: Mapping[str, str] | None = None) -> bytes:
    """The header block of a call: literals, without Huffman coding and without the table (RFC 7541, 6.2.2)."""
    fields: dict[str, str | bytes] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
        **(more or {}),
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())


def referred(fields: Mapping[bytes, bytes], last: int) -> tuple[bytes, bytes]:
    """Two header blocks with the same fields, the last of them `last` times.

    The first puts each into the connection's table, and the second only refers to them, with a byte each (6.1, 6.2.1).
    """
    first = b"".join(b"\x40" + _text(name) + _text(value) for name, value in fields.items())
    newest = 0x80 | 62  # after the 61 of the static table
    numbers = [newest + age for age in reversed(range(len(fields)))]
    return first, bytes(numbers[:-1] + [newest] * last)


def inflated(method: str, stream: int, fields: int, *, whole: bool = True) -> bytes:
    """A call whose headers have so many fields more, a byte each: references to `cookie` of the static table (6.1).

    They end if it is to be whole, and then the call is cancelled.
    """
    refers = bytes([0x80 | 32]) * fields
    pieces = [refers[at : at + _MOST_IN_A_FRAME] for at in range(0, fields, _MOST_IN_A_FRAME)]
    sent = frame(HEADERS, 0, stream, call_headers(method))
    sent += b"".join(frame(CONTINUATION, 0, stream, piece) for piece in pieces)
    return sent + frame(CONTINUATION, END_HEADERS, stream, b"") + _cancel(stream) if whole else sent


def claimed(size: int) -> bytes:
    """The head of a gRPC message that says it is so long."""
    return b"\0" + struct.pack(">I", size)


def framed(message: Message) -> bytes:
    """A gRPC message, whole."""
    data = message.SerializeToString()
    return claimed(len(data)) + data


def open_call(method: str | bytes, stream: int = 1) -> bytes:
    """A connection's beginning and a call on it, whose message is yet to come."""
    return PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, stream, call_headers(method))


def connect(address: str, timeout: float = 10.0) -> socket.socket:
    """A connection to "host:port"."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


def _cancel(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    assert len(data) < 127, "longer ones have another form"
    return bytes([len(data)]) + data
