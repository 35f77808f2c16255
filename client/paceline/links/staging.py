"""How much memory for copies each link may take: all links of a member together stay within two buckets of 25 MiB.

Decided by the view alone: the members of a group agree on how long frames are, and each link has room for them.
"""

from __future__ import annotations

from paceline.links.shm.layout import STAGING_BYTES

__all__ = [
    "BUDGET_BYTES",
    "LONGEST_FRAMES_AHEAD",
    "LONGEST_FRAME_BYTES",
    "LONG_FRAMES_AHEAD",
    "LONG_FRAME_BYTES",
    "STREAMED_BYTES",
    "frame_bytes",
    "staging_bytes",
]

BUDGET_BYTES = 48 << 20
"""Staging of all links for collectives of one group; two buckets of `DDP(bucket_mb=25)` are 50 MiB."""

_FRAMES = 6
"""Frames in staging: the 4 that a schedule sends ahead of what it has received (`program.AHEAD`), and what is lost
where the ring begins anew."""

_LEAST = 1 << 16

LONG_FRAME_BYTES = 4 << 20
"""Bytes of a frame of an all_reduce between the only two members of a node."""

LONG_FRAMES_AHEAD = 2
"""How many of them a schedule sends ahead: staging holds those, and what is lost where the ring begins anew."""

LONGEST_FRAME_BYTES = LONG_FRAME_BYTES + 1024
"""Bytes of such a frame where the array is too large for the caches: just longer than all others, by which its reader
knows that it is to be copied past the caches (`shm.copying`). The longest signature fits beside it
(`MAX_FRAME_BYTES`)."""

LONGEST_FRAMES_AHEAD = 1
"""How many of those a schedule sends ahead: two are more than the 8 MiB that every link must hold."""

STREAMED_BYTES = LONG_FRAME_BYTES - (64 << 10)
"""From where on copies go past the caches (`cli.launcher.streaming`). Less than a long frame has: some of glibc's ways
to copy ask for more than the threshold, or leave out a line or two at the ends. And no more than longest frames leave
at the end of a chunk of 4, 8, 12, ... 256 MiB."""


def frame_bytes(neighbours: int) -> int:
    """Bytes of the longest frame of a collective between members of one node, but for long ones: a power of two.

    Args:
        neighbours: `Mesh.neighbours`.
    """
    most = min(STAGING_BYTES, BUDGET_BYTES // max(1, neighbours)) // _FRAMES
    return max(_LEAST, 1 << (most.bit_length() - 1))


def staging_bytes(neighbours: int) -> int:
    """Bytes of staging that a link uses; `STAGING_BYTES` at most. A longer payload than that has staging to itself."""
    return _FRAMES * frame_bytes(neighbours)
