"""Sizes: as people write them, and as a collective can have them. Pure. W is the world size."""

from __future__ import annotations

import re

__all__ = ["ELEMENT_BYTES", "PARTED", "measured_size", "parse_size", "parse_sizes", "size_text"]

ELEMENT_BYTES = 4
"""All that is measured is float32."""

PARTED = frozenset({"reduce_scatter", "scatter", "all_gather", "gather", "all_to_all"})
"""Collectives whose whole is made of W equal parts, one for each rank or from each."""

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_sizes(text: str) -> list[int]:
    """Reads "1KiB,1MiB,64MiB" as bytes; see `parse_size`."""
    return [parse_size(word) for word in text.split(",")]


def parse_size(text: str) -> int:
    """Reads "64KiB" as bytes; whole float32 elements only.

    Raises:
        ValueError: the size is malformed, not above 0, or not a multiple of 4 bytes.
    """
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text.strip()!r} is not a size like 1KiB, 16MiB or 4096")
    size = int(found[1]) * unit
    if size == 0 or size % ELEMENT_BYTES:
        raise ValueError(f"{text.strip()} is not a number of float32 elements: a multiple of 4 bytes above 0")
    return size


def size_text(size: int) -> str:
    """1048576 as "1 MiB"; what is not whole stays in bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def measured_size(collective: str, size: int, world: int) -> int:
    """The size in bytes that a collective can have: rounded up to W equal parts of whole elements where it has parts.

    Of what: of the array that is the same at all ranks or passes through one. That is each rank's array for all_reduce,
    reduce, broadcast and send_recv, a rank's whole input for reduce_scatter and all_to_all, the root's for scatter, and
    the whole result for all_gather and gather. As in nccl-tests. A barrier has none.

    Args:
        collective: as methods of `Group` spell it; or "send_recv".
        size: bytes asked for.
        world: W.
    """
    if collective == "barrier":
        return 0
    unit = ELEMENT_BYTES * world if collective in PARTED else ELEMENT_BYTES
    return -(-size // unit) * unit
