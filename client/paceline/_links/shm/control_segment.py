"""Where things lie in the control segment of one direction, which its writer writes and its reader only reads.

    page 0        whether what was lent is void, how many frames there are, marks
    slots         a ring of SLOTS slots: a descriptor, a signature, and a payload if it is small
    staging       a ring of bytes: copies of larger payloads that do not lie in an arena

A frame or a mark is believed only when its count has been read from the bell, an eventfd: the kernel's lock on the
count orders the memory, on arm64 too. What page 0 says of them is a hint that it is time to read the bell. The reader
gives slots back by counts on a second eventfd, in the order of the frames.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from paceline._links.base import MARKS
from paceline._links.frame import MAX_FRAME_BYTES, MAX_SIGNATURE_BYTES

__all__ = [
    "CONTROL_BYTES",
    "ControlMemory",
    "DESCRIPTOR",
    "Descriptor",
    "FRAME",
    "INLINE_AT",
    "INLINE_BYTES",
    "LAYOUT",
    "MARK",
    "MARKS_AT",
    "MAX_PAYLOAD_BYTES",
    "PAGE",
    "SIGNATURE_AT",
    "SLOTS",
    "SLOTS_AT",
    "SLOT_BYTES",
    "STAGING_AT",
    "STAGING_BYTES",
    "TOLD_AT",
    "VOID_AT",
    "PayloadPlace",
    "frame_bytes",
    "staging_bytes",
]

LAYOUT = 3
"""Number of this layout: both sides must mean the same."""

PAGE = 4096
"""Unit of all sizes and large offsets; a multiple of it where pages are larger would do as well."""

DESCRIPTOR = struct.Struct("<QIIQQIIQQQ")
"""The fields of `Descriptor`."""

SLOTS = 64
"""Frames on their way at a time: as many as a local link holds."""

SIGNATURE_AT = DESCRIPTOR.size
INLINE_AT = SIGNATURE_AT + MAX_SIGNATURE_BYTES
INLINE_BYTES = 7168
"""A payload up to this size lies in its slot, and is copied out of it: cheaper than to wait for its release."""

SLOT_BYTES = INLINE_AT + INLINE_BYTES

VOID_AT = 0
"""Not 0: whatever was lent and is not released yet has been taken back. It stays so."""

TOLD_AT = 64
"""How many frames were sent: 8 bytes in the machine's order. A hint."""

MARKS_AT = 128
"""The writer's last `_links.base.MARKS` marks, a ring: 8 bytes each, in the machine's order."""

FRAME, MARK = 1, 1 << 32
"""What each adds to the bell."""

SLOTS_AT = PAGE
STAGING_AT = SLOTS_AT + SLOTS * SLOT_BYTES

STAGING_BYTES = 12 << 20
"""Room for copies in each control segment, of which a link uses `staging_bytes`. The system provides the memory only
as far as it has ever been used."""

CONTROL_BYTES = STAGING_AT + STAGING_BYTES

MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES
"""No payload is longer; one that long fits staging, wherever the last one ended."""


class PayloadPlace(IntEnum):
    """Where a payload lies."""

    SLOT = 1
    STAGING = 2
    ARENA = 3


class Descriptor(NamedTuple):
    """What a slot says of its frame. The writer may put anything there, so the reader checks each field (I9).

    Attributes:
        number: of the frame in this direction, from 0.
        kind: as in `Frame`.
        part: as in `Frame`.
        generation: as in `Frame`.
        operation: as in `Frame`.
        place: a `PayloadPlace`.
        signature_bytes: length of the signature, which is in the slot.
        size: bytes of the payload.
        segment: number of the arena's segment that holds the payload.
        offset: where the payload begins in the control segment or in that one.
    """

    number: int
    kind: int
    part: int
    generation: int
    operation: int
    place: int
    signature_bytes: int
    size: int
    segment: int
    offset: int


class ControlMemory:
    """The parts of a control segment by name. Only its writer has it mapped for writing.

    Args:
        memory: the segment, shape [CONTROL_BYTES].

    Attributes:
        told: shape [1]: how many frames were sent. A hint.
        marks: shape [MARKS]: the writer's last marks, a ring.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.told = memory[TOLD_AT : TOLD_AT + 8].cast("Q")
        self.marks = memory[MARKS_AT : MARKS_AT + 8 * MARKS].cast("Q")

    @property
    def is_void(self) -> bool:
        """True if whatever was lent and is not released yet has been taken back."""
        return self._memory[VOID_AT] != 0

    def set_void(self) -> None:
        """Takes back whatever was lent and is not released yet."""
        self._memory[VOID_AT] = 1

    def describe(self, descriptor: Descriptor, signature: bytes) -> None:
        """Writes a descriptor and a signature into the slot of the frame."""
        at = _slot_at(descriptor.number)
        self._memory[at + SIGNATURE_AT : at + SIGNATURE_AT + len(signature)] = signature
        DESCRIPTOR.pack_into(self._memory, at, *descriptor)

    def descriptor(self, number: int) -> Descriptor:
        """What the slot of a frame says; unchecked."""
        return Descriptor(*DESCRIPTOR.unpack_from(self._memory, _slot_at(number)))

    def signature(self, number: int, size: int) -> bytes:
        """The first `size` bytes of the signature in the slot of a frame; a copy."""
        at = _slot_at(number) + SIGNATURE_AT
        return bytes(self._memory[at : at + size])

    def inline(self, number: int, size: int) -> memoryview:
        """Where the slot of a frame has a payload of `size` bytes, `INLINE_BYTES` at most."""
        at = _slot_at(number) + INLINE_AT
        return self._memory[at : at + size]

    def staged(self, offset: int, size: int) -> memoryview:
        """`size` bytes of staging; the offset is that in the segment."""
        return self._memory[offset : offset + size]


def _slot_at(number: int) -> int:
    return SLOTS_AT + number % SLOTS * SLOT_BYTES


_ALL_STAGING_BYTES = 48 << 20
"""What the staging of all links of one member may take together."""

_STAGED_FRAMES = 6
"""Frames that staging must hold: the 4 that a program sends ahead (`_collectives.program.AHEAD`), the one that is being
read, and up to one that is lost where the ring begins anew."""

_LEAST_FRAME_BYTES = 64 << 10


def frame_bytes(neighbours: int) -> int:
    """Bytes of the longest frame of a collective between members of one node: a power of two, 2 MiB at most.

    It follows from the view alone, so that all members agree, and every link of a member has room for its frames.

    Args:
        neighbours: `Mesh.neighbours`.
    """
    most = min(STAGING_BYTES, _ALL_STAGING_BYTES // max(1, neighbours)) // _STAGED_FRAMES
    return max(_LEAST_FRAME_BYTES, 1 << (most.bit_length() - 1))


def staging_bytes(neighbours: int) -> int:
    """Bytes of staging that a link uses. A payload longer than that waits until it has all of `STAGING_BYTES`."""
    return _STAGED_FRAMES * frame_bytes(neighbours)


assert DESCRIPTOR.size == 64  # a cache line
assert STAGING_AT % PAGE == CONTROL_BYTES % PAGE == 0
