"""Views to store."""

from __future__ import annotations

from hashlib import sha256

from paceline_protocol import OURS, JobSettings, Process, Seat, View

__all__ = ["view"]


def view(generation: int, world: int = 2) -> View:
    """A view of that many members on one host."""
    seats = tuple(
        Seat(
            rank,
            f"m{rank}",
            Process("h", rank + 1, "boot", 5, 7, "node"),
            "h:1",
            sha256(b"%d" % rank).digest(),
            rank + 1,
        )
        for rank in range(world)
    )
    return View(generation, JobSettings(1, 4, 2.5, "0123456789abcdef"), False, seats, OURS)
