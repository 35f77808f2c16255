"""The checksum of frames: the same wherever the bytes lie, and another one whatever has changed."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._links.frame import COLUMNS, FOLDED, checksum

ROW = 8 * COLUMNS
SIZES = [0, 1, FOLDED - 1, FOLDED, 17 * ROW, 17 * ROW + 5, (1 << 20) + 3]


def defined(payload: bytes, before: int) -> int:
    """As peer.proto has it."""
    if len(payload) < FOLDED:
        return zlib.crc32(payload, before)
    rows, sums = len(payload) // ROW, [0] * COLUMNS
    for number in range(rows * COLUMNS):
        sums[number % COLUMNS] += int.from_bytes(payload[8 * number : 8 * number + 8], "little")
    folded = b"".join((each % 2**64).to_bytes(8, "little") for each in sums)
    return zlib.crc32(payload[rows * ROW :], zlib.crc32(folded, before))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 3, 4])
def test_the_checksum_matches_its_definition_at_any_alignment(size: int, offset: int) -> None:
    payload = random.Random(size).randbytes(size)
    assert checksum(memoryview(bytes(offset) + payload)[offset:], 77) == checksum(payload, 77) == defined(payload, 77)


@given(st.sampled_from(SIZES[1:]), st.data())
def test_any_change_within_the_length_of_a_row_changes_the_checksum(size: int, data: st.DataObject) -> None:
    payload = bytearray(random.Random(size).randbytes(size))
    right = checksum(payload)
    at = data.draw(st.integers(0, size - 1))
    change = data.draw(st.binary(min_size=1, max_size=64))
    for index, bits in enumerate(change[: size - at]):
        payload[at + index] ^= bits
    assert (checksum(payload) == right) == (not any(change[: size - at]))


@pytest.mark.parametrize("apart", [1, 8, 1448, 1460, 4096, 8960, 65536])
def test_two_opposite_bit_flips_change_the_checksum(apart: int) -> None:
    """As far apart as packets, pages and pieces are: each bit of a sum of their words would cancel."""
    payload = bytearray(1 << 20)
    payload[100] = 1
    right = checksum(payload)
    payload[100], payload[100 + apart] = 0, 1
    assert checksum(payload) != right


def test_the_checksum_depends_on_the_previous_checksum() -> None:
    assert len({checksum(bytes(size), before) for size in SIZES for before in (0, 1)}) >= 2 * len(SIZES) - 1
