"""What travels on data sockets: whatever is sent is read back, and nothing else is taken for it."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.frame import MAX_FRAME_BYTES, Frame, FrameDamaged, FrameError, FrameKind
from paceline._links.tcp._tcp_wire import (
    HEAD_BYTES,
    HELLO_BYTES,
    MAX_STREAMS,
    MIN_PIECE,
    TICKET_BYTES,
    Hello,
    cut,
    decode_head,
    decode_hello,
    encode_head,
    encode_hello,
)

WORD = st.integers(0, 2**64 - 1)


@given(WORD, WORD, st.integers(0, 2**32 - 1), st.binary(max_size=MAX_SIGNATURE_BYTES), st.binary())
def test_a_header_round_trips(generation: int, operation: int, part: int, signature: bytes, payload: bytes) -> None:
    frame = Frame(FrameKind.DATA, generation, operation, part, signature, payload)
    data = encode_head(frame)
    head = decode_head(memoryview(data)[:HEAD_BYTES])
    assert data[HEAD_BYTES:] == signature
    assert (head.words, head.size, head.checksum) == (len(signature), len(payload), zlib.crc32(signature + payload))
    assert head.to_frame(signature, payload) == frame


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_arbitrary_header_bytes_decode_within_limits_or_raise_frame_error(data: bytes) -> None:
    for begin in (b"", b"\xa7", b"\xa7\x00", b"\xa7\x00\x00\x00"):
        fields = begin + data[len(begin) : -4]
        try:
            head = decode_head(memoryview(fields + zlib.crc32(fields).to_bytes(4, "little")))
        except FrameError:
            continue
        assert head.words <= MAX_SIGNATURE_BYTES
        assert head.words + head.size + HEAD_BYTES <= MAX_FRAME_BYTES


def test_a_header_with_a_flipped_bit_raises_frame_damaged() -> None:
    whole = encode_head(Frame(FrameKind.DATA, 2**40 + 1, 5, 7, b"", b"some payload"))
    for bit in range(8 * HEAD_BYTES):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameDamaged):
            decode_head(memoryview(changed))


def test_encode_head_refuses_non_data_and_oversized_frames() -> None:
    with pytest.raises(FrameError, match="ABORT"):
        encode_head(Frame(FrameKind.ABORT, 1, 1, 0, b"", b""))
    longest = MAX_FRAME_BYTES - HEAD_BYTES
    encode_head(Frame(FrameKind.DATA, 1, 1, 0, b"", bytes(longest)))
    with pytest.raises(FrameError, match="above the limit"):
        encode_head(Frame(FrameKind.DATA, 1, 1, 0, b"", bytes(longest + 1)))
    with pytest.raises(FrameError, match="above the limit"):
        encode_head(Frame(FrameKind.DATA, 1, 1, 0, bytes(MAX_SIGNATURE_BYTES + 1), b""))


@given(st.binary(min_size=TICKET_BYTES, max_size=TICKET_BYTES), st.integers(1, MAX_STREAMS), st.data())
def test_a_hello_round_trips(ticket: bytes, streams: int, more: st.DataObject) -> None:
    hello = Hello(ticket, more.draw(st.integers(0, streams - 1)), streams)
    data = encode_hello(hello)
    assert len(data) == HELLO_BYTES
    assert decode_hello(data) == hello


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a.b\r\n",
        encode_hello(Hello(bytes(TICKET_BYTES), 0, 1))[:-1],
        encode_hello(Hello(bytes(TICKET_BYTES), 0, 0)),
        encode_hello(Hello(bytes(TICKET_BYTES), 1, 1)),
        encode_hello(Hello(bytes(TICKET_BYTES), 0, MAX_STREAMS + 1)),
        b"q" + encode_hello(Hello(bytes(TICKET_BYTES), 0, 1))[1:],
    ],
)
def test_a_malformed_hello_raises_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_hello(data)


@given(st.integers(0, MAX_FRAME_BYTES), st.integers(1, MAX_STREAMS), st.integers(0, 2**40))
def test_pieces_cover_a_payload_once_each_on_a_separate_stream(size: int, streams: int, number: int) -> None:
    pieces = cut(size, streams, number)
    assert pieces[0][0] == number % streams
    assert len({stream for stream, _, _ in pieces}) == len(pieces) <= streams
    assert [begin for _, begin, _ in pieces] == [0, *(end for _, _, end in pieces[:-1])]
    assert pieces[-1][2] == size
    assert all(end - begin >= MIN_PIECE for _, begin, end in pieces[:-1])
