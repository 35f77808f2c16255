"""Messages as frames and back, and all that may be wrong with frames that claim to be one."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._collectives.mailbox import ArrayMessage, Assembler, to_frames
from paceline._collectives.program import SEGMENT_BYTES
from paceline._links.frame import Frame, FrameKind

BIG = np.arange(3 * SEGMENT_BYTES // 8 + 5, dtype=np.float64)


def assemble(assembler: Assembler, frames: list[Frame]) -> list[ArrayMessage]:
    return [message for frame in frames if (message := assembler.add(frame)) is not None]


def test_a_message_survives_the_round_trip_through_frames() -> None:
    frames = list(to_frames(BIG, 7, 3, 1))
    assert [frame.part for frame in frames] == [0, 1, 2, 3]
    assert [bool(frame.signature) for frame in frames] == [True, False, False, False]
    (message,) = assemble(Assembler(2), frames)
    assert (message.source, message.tag, message.dtype, message.shape) == (2, 7, BIG.dtype, BIG.shape)
    result = np.empty_like(BIG)
    message.unpack(result)
    np.testing.assert_array_equal(result, BIG)


def test_an_incomplete_message_is_dropped_when_the_next_begins() -> None:
    assembler = Assembler(0)
    given_up = list(to_frames(BIG, 1, 1, 1))[:2]
    whole = list(to_frames(np.ones(3), 2, 1, 2))
    (message,) = assemble(assembler, given_up + whole)
    assert message.tag == 2


FIRST, SECOND, *_ = to_frames(BIG, 1, 1, 1)


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ([SECOND], "out of order"),
        ([FIRST, FIRST], "message 1 where message 2 was due"),
        ([FIRST, replace(SECOND, part=2)], "out of order"),
        ([FIRST, replace(SECOND, operation=2)], "out of order"),
        ([replace(FIRST, operation=2)], "message 2 where message 1 was due"),
        ([FIRST, replace(SECOND, payload=b"short")], "5 bytes in frame 1"),
        ([replace(FIRST, payload=bytes(SEGMENT_BYTES + 1))], "bytes in frame 0"),
        ([replace(FIRST, signature=b"")], "not a signature"),
        ([replace(FIRST, signature=b"barrier")], "a frame that does not begin a message"),
        ([replace(FIRST, signature=b"send tag=x float32[1]")], "a frame that does not begin a message"),
        ([replace(FIRST, signature=b"send tag=1")], "without an array"),
        ([replace(FIRST, signature=b"send tag=1 float64[999999999999999,9999]")], "impossible"),
    ],
)
def test_invalid_frame_sequences_are_refused(frames: list[Frame], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        assemble(Assembler(0), frames)


@given(st.binary(max_size=40), st.binary(max_size=20), st.integers(0, 3), st.integers(0, 3))
def test_random_frames_are_accepted_or_raise_value_error(
    signature: bytes, payload: bytes, part: int, number: int
) -> None:
    with contextlib.suppress(ValueError):
        Assembler(0).add(Frame(FrameKind.DATA, 1, number, part, signature, payload))
