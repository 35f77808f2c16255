"""The layout of the control segment of one direction. The writer writes it, and the reader only reads it.

    page 0        whether lent payloads are void, how many frames were sent, marks
    slots         a ring of SLOTS slots: a descriptor, a signature, and a payload if it is small
    staging       a ring of bytes: copies of larger payloads that do not lie in an arena

The reader uses a frame or a mark only after it has read its count from the bell, an eventfd: the kernel's lock on the
count orders the memory, on arm64 too. The counts on page 0 only hint that it is time to read the bell. The reader gives
slots back in the order of the frames, by counts on a second eventfd.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.base import MARKS
from paceline._links.frame import MAX_FRAME_BYTES

LAYOUT = 3
"""Number of this layout. Both sides must have the same one."""

PAGE = 4096
"""Unit of all sizes and large offsets, in bytes. On systems with larger pages, a multiple of it would also do."""

DESCRIPTOR = struct.Struct("<QIIQQIIQQQ")
"""The fields of `Descriptor`."""

SLOTS = 64
"""Frames in transit at a time: as many as a local link holds."""

SIGNATURE_AT = DESCRIPTOR.size
INLINE_AT = SIGNATURE_AT + MAX_SIGNATURE_BYTES
INLINE_BYTES = 7168
"""Largest payload in bytes that lies in its slot. The reader copies it out, which is cheaper than a later release."""

SLOT_BYTES = INLINE_AT + INLINE_BYTES

VOID_AT = 0
"""Offset of the void flag. If it is not 0, the writer has taken back all lent payloads that are not released yet. It is
never reset."""

TOLD_AT = 64
"""Offset of the number of frames sent: 8 bytes in native order. It is a hint."""

MARKS_AT = 128
"""Offset of the ring of the writer's last `_links.base.MARKS` marks: 8 bytes each, in native order."""

FRAME, MARK = 1, 1 << 32
"""The numbers that a frame and a mark add to the bell's count."""

SLOTS_AT = PAGE
STAGING_AT = SLOTS_AT + SLOTS * SLOT_BYTES

STAGING_BYTES = 12 << 20
"""Room for copies in each control segment. A link uses `staging_bytes` of it. The system allocates memory only for the
part that has been used."""

CONTROL_BYTES = STAGING_AT + STAGING_BYTES

MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES
"""Longest payload. It fits into staging, wherever the previous payload ended."""


class PayloadPlace(IntEnum):
    """The place where a payload lies."""

    SLOT = 1
    STAGING = 2
    ARENA = 3


class Descriptor(NamedTuple):
    """A slot's description of its frame. The writer can write anything there, so the reader checks each field (I9).

    `number` counts the frames of this direction, from 0. The signature lies in the slot. The payload of `size` bytes
    begins at `offset`, in the control segment or in the arena's segment with the number `segment`, as `place` says.
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
    """The named parts of a control segment. Only the writer has it mapped for writing.

    `told`, shape [1], is how many frames were sent, a hint. `marks`, shape [MARKS], is the ring of the last marks.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.told = memory[TOLD_AT : TOLD_AT + 8].cast("Q")
        self.marks = memory[MARKS_AT : MARKS_AT + 8 * MARKS].cast("Q")

    @property
    def is_void(self) -> bool:
        """True if the writer has taken back all lent payloads that are not released yet."""
        return self._memory[VOID_AT] != 0

    def set_void(self) -> None:
        """Takes back all lent payloads that are not released yet."""
        self._memory[VOID_AT] = 1

    def describe(self, descriptor: Descriptor, signature: bytes) -> None:
        """Writes a descriptor and a signature into the frame's slot."""
        at = _slot_at(descriptor.number)
        self._memory[at + SIGNATURE_AT : at + SIGNATURE_AT + len(signature)] = signature
        DESCRIPTOR.pack_into(self._memory, at, *descriptor)

    def descriptor(self, number: int) -> Descriptor:
        """Returns the unchecked descriptor in a frame's slot."""
        return Descriptor(*DESCRIPTOR.unpack_from(self._memory, _slot_at(number)))

    def signature(self, number: int, size: int) -> bytes:
        """Returns a copy of the first `size` bytes of the signature in a frame's slot."""
        at = _slot_at(number) + SIGNATURE_AT
        return bytes(self._memory[at : at + size])

    def inline(self, number: int, size: int) -> memoryview:
        """Returns the bytes in a frame's slot for a payload of `size` bytes, at most `INLINE_BYTES`."""
        at = _slot_at(number) + INLINE_AT
        return self._memory[at : at + size]

    def staged(self, offset: int, size: int) -> memoryview:
        """Returns `size` bytes of staging; the offset is relative to the segment."""
        return self._memory[offset : offset + size]


def _slot_at(number: int) -> int:
    return SLOTS_AT + number % SLOTS * SLOT_BYTES


_ALL_STAGING_BYTES = 48 << 20
"""Most bytes of staging that all links of one member use together."""

_STAGED_FRAMES = 6
"""Frames that staging must hold: the 4 that a program sends ahead (`_collectives.program.AHEAD`), the one that is being
read, and up to one that is wasted where the ring wraps around."""

_LEAST_FRAME_BYTES = 64 << 10


def frame_bytes(neighbours: int) -> int:
    """Returns the bytes of the longest frame of a collective between members of a node: a power of two, at most 2 MiB.

    It depends only on the view, so that all members agree, and every link of a member has room for its frames.
    """
    most = min(STAGING_BYTES, _ALL_STAGING_BYTES // max(1, neighbours)) // _STAGED_FRAMES
    return max(_LEAST_FRAME_BYTES, 1 << (most.bit_length() - 1))


def staging_bytes(neighbours: int) -> int:
    """Returns the bytes of staging that a link uses. A longer payload waits until it has all of `STAGING_BYTES`."""
    return _STAGED_FRAMES * frame_bytes(neighbours)


assert DESCRIPTOR.size == 64  # a cache line
assert STAGING_AT % PAGE == CONTROL_BYTES % PAGE == 0
