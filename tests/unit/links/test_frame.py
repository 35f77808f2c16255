"""The frame's encoding: canonical, plain protobuf, and safe to read from anybody."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.frame import MAX_FRAME_BYTES, Frame, FrameDamaged, FrameError, FrameKind, decode, encode
from pacelinepb.v1.peer_pb2 import FramesRequest

U64 = st.integers(0, 2**64 - 1)
FRAMES = st.builds(
    Frame,
    st.sampled_from(FrameKind),
    U64,
    U64,
    st.integers(0, 2**32 - 1),
    st.binary(max_size=MAX_SIGNATURE_BYTES),
    st.binary(max_size=40_000),
)


@given(FRAMES)
def test_round_trip(frame: Frame) -> None:
    back = decode(encode(frame))
    assert back == frame
    assert isinstance(back.payload, memoryview)


@given(FRAMES)
def test_a_protobuf_decoder_reads_an_encoded_frame(frame: Frame) -> None:
    message = FramesRequest.FromString(encode(frame))
    assert (message.kind, message.generation, message.operation, message.part) == (
        frame.kind,
        frame.generation,
        frame.operation,
        frame.part,
    )
    assert (message.signature, message.payload) == (frame.signature, frame.payload)
    assert message.checksum == zlib.crc32(encode(frame)[:-4])


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data)


@given(FRAMES, st.data())
def test_a_truncated_frame_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = encode(frame)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(FrameError):
        decode(whole[:cut])


@given(FRAMES, st.data())
def test_a_changed_byte_raises_frame_damaged(frame: Frame, data: st.DataObject) -> None:
    whole = bytearray(encode(frame))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameDamaged):
        decode(bytes(whole))


def test_any_flipped_bit_raises_frame_damaged() -> None:
    whole = encode(Frame(FrameKind.DATA, 2**40 + 1, 5, 7, b"all_reduce", b"some payload"))
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameDamaged):
            decode(bytes(changed))


@given(FRAMES, st.data())
def test_a_forged_checksum_gives_a_canonical_frame_or_frame_error(frame: Frame, data: st.DataObject) -> None:
    """Whoever means harm can compute it: either refused, or another frame that is itself in canonical form."""
    whole = bytearray(encode(frame))
    whole[data.draw(st.integers(0, len(whole) - 5))] ^= data.draw(st.integers(1, 255))
    whole[-4:] = zlib.crc32(whole[:-4]).to_bytes(4, "little")
    try:
        other = decode(bytes(whole))
    except FrameError:
        return
    assert encode(other) == bytes(whole)


def test_encode_and_decode_refuse_oversized_frames() -> None:
    frame = Frame(FrameKind.DATA, 1, 1, 0, b"", bytes(MAX_FRAME_BYTES))
    with pytest.raises(FrameError, match="limit"):
        encode(frame)
    with pytest.raises(FrameError, match="cannot be a frame"):
        decode(bytes(MAX_FRAME_BYTES + 1))
