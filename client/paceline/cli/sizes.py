"""Sizes of arrays, as `paceline bench` and `paceline debug schedules` read and show them. Pure."""

from __future__ import annotations

import re

ELEMENT_BYTES = 4
"""All arrays are float32."""

_PARTED = frozenset({"reduce_scatter", "scatter", "all_gather", "gather", "all_to_all"})
"""Collectives whose whole array consists of W equal parts, one for each rank or from each."""

_BINARY = {f"{letter}{end}": 1 << bits for letter, bits in (("k", 10), ("m", 20), ("g", 30)) for end in ("", "ib")}
_UNITS = {"": 1, "b": 1, **_BINARY, "kb": 10**3, "mb": 10**6, "gb": 10**9}
"""K, M and G alone are powers of 1024, as for nccl-tests and the OSU benchmarks."""


def parse_sizes(text: str) -> list[int]:
    """Parses "1KiB,1MiB,64MiB" to bytes; see `parse_size`."""
    return [parse_size(word) for word in text.split(",")]


def parse_size(text: str) -> int:
    """Parses "64KiB", "64K" or "64kB" to bytes; accepts whole float32 elements only.

    Raises:
        ValueError: the size is malformed, not above 0, or not a multiple of 4 bytes.
    """
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text.strip()!r} is not a size like 64K, 16MiB or 4096")
    size = int(found[1]) * unit
    if size == 0 or size % ELEMENT_BYTES:
        raise ValueError(f"{text.strip()} is not a whole number of float32 elements: a multiple of 4 bytes above 0")
    return size


def size_text(size: int) -> str:
    """Formats 1048576 as "1 MiB"; a size that is not a whole number of KiB stays in bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def measured_size(collective: str, size: int, world: int) -> int:
    """Returns the bytes at which a collective is measured: of the whole array, rounded up to equal parts if it has W.

    The whole array is each rank's for all_reduce, reduce, broadcast and send_recv; a rank's input for reduce_scatter
    and all_to_all; the root's input for scatter; the result for all_gather and gather. A barrier has none.
    """
    if collective == "barrier":
        return 0
    unit = ELEMENT_BYTES * world if collective in _PARTED else ELEMENT_BYTES
    return -(-size // unit) * unit


def bus_factor(collective: str, world: int) -> float:
    """Returns the least bytes that any algorithm sends one way on each member's link, for each byte of the size.

    Times bytes per second it is the bus bandwidth, which is comparable across world sizes, unlike size / time.
    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if collective == "all_reduce":
        return 2 * (world - 1) / world
    if collective in _PARTED:
        return (world - 1) / world
    return 0.0 if collective == "barrier" else 1.0
