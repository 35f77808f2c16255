"""Who is started again, when, and who is given up. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.launcher.outcome import Exit

__all__ = ["AT_ONCE_S", "GIVE_UP_AFTER", "Restart", "Restarts", "SETTLED_S"]

AT_ONCE_S = 5.0
"""A worker that fails sooner than this, and in no view yet, has died at once: what kills it is in its start."""

GIVE_UP_AFTER = 3
"""So many deaths at once in a row: the next start would end in the same way."""

SETTLED_S = 60.0
"""A worker that has lived for this long was well: when it fails, it is started again as if it were the first time."""

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class Restart:
    """What is to be done about a failed worker.

    Attributes:
        text: one sentence for people; it tells of the failure too.
        at: when to start a new worker in its place; None for never.
    """

    text: str
    at: float | None = None


@dataclass(slots=True)
class _Slot:
    """The place of one worker, which one process after another may fill."""

    began: float = 0.0
    used: int = 0
    """Restarts so far."""
    delay: float = _FIRST_DELAY_S
    """Before the next one."""
    at_once: int = 0
    """Deaths at once in a row."""


class Restarts:
    """Decides for the workers of one launcher, each for itself.

    A worker that fails is started again as a new worker after a pause, which doubles from 0.1 s to 10 s: a cause that
    lasts (a full disk, a port in use) is not to be met a hundred times a second. It begins anew with a worker that has
    lived for a minute.

    Args:
        limit: how often each worker is started again at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: dict[int, _Slot] = {}

    def began(self, slot: int, now: float) -> None:
        """A worker was started."""
        self._slots.setdefault(slot, _Slot()).began = now

    def left(self, slot: int) -> int:
        """How often a worker may still be started again."""
        return self._limit - (self._slots[slot].used if slot in self._slots else 0)

    def failed(self, end: Exit, now: float) -> Restart:
        """A worker has failed."""
        slot = self._slots.setdefault(end.slot, _Slot(now))
        lived = now - slot.began
        slot.at_once = slot.at_once + 1 if lived < AT_ONCE_S and not end.joined else 0
        if not self._limit:
            return Restart(str(end))
        if slot.at_once >= GIVE_UP_AFTER:
            return Restart(
                f"giving up {end.label}: it failed {slot.at_once} times in a row within {AT_ONCE_S:g} s, before "
                f"it was in a view; the last one (pid {end.pid}) {end.how}"
            )
        if slot.used >= self._limit:
            used_up = "its only restart is" if self._limit == 1 else f"its {self._limit} restarts are"
            return Restart(f"{end}; {used_up} used up")
        if lived >= SETTLED_S:
            slot.delay = _FIRST_DELAY_S
        slot.used += 1
        delay, slot.delay = slot.delay, min(2 * slot.delay, _LONGEST_DELAY_S)
        text = (
            f"restarting {end.label} (pid {end.pid} {end.how}) as a new worker in {delay:g} s, "
            f"{slot.used} of {self._limit}"
        )
        return Restart(text, now + delay)
