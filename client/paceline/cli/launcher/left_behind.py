"""Decides about workers that run, and without which the job goes on: they are frozen, or hang in a call. Pure."""

from __future__ import annotations

from collections.abc import Collection

TELL_S = 5.0
"""Seconds after which it is said: a worker on a busy machine may be so late in a new generation."""

HUNG_S = 30.0
"""Seconds after which such a worker counts as hung. Until then it may come back by itself, with its state."""


class LeftBehind:
    """The workers without which the job goes on, by slot, each with the time since when."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._told: set[int] = set()
        self._hung: set[int] = set()

    def see(self, slots: Collection[int], now: float) -> None:
        """Records which workers are left behind now."""
        self._since = {slot: self._since.get(slot, now) for slot in slots}
        self._told.intersection_update(slots)
        self._hung.intersection_update(slots)

    def begin_anew(self) -> None:
        """Forgets since when: from now on something else follows for these workers."""
        for kept in (self._since, self._told, self._hung):
            kept.clear()

    @property
    def deadline(self) -> float | None:
        """The time at which `to_tell` or `hung` will next return another worker; None for never."""
        told = [since + TELL_S for slot, since in self._since.items() if slot not in self._told]
        hung = [since + HUNG_S for slot, since in self._since.items() if slot not in self._hung]
        return min([*told, *hung], default=None)

    def to_tell(self, now: float) -> list[int]:
        """Returns the workers of which it is to be said now; each is returned once."""
        due = [slot for slot, since in self._since.items() if now >= since + TELL_S and slot not in self._told]
        self._told.update(due)
        return due

    def hung(self, now: float) -> list[int]:
        """Returns all workers that count as hung."""
        self._hung.update(slot for slot, since in self._since.items() if now >= since + HUNG_S)
        return sorted(self._hung)
