"""Was the coordinator itself asleep? Pure: the shell says at which times it ran.

Silence of a member counts only while the coordinator listened. A slow disk, a paused VM or a SIGSTOP makes every member
look silent; whoever was asleep judges nobody.
"""

from __future__ import annotations

__all__ = ["Wakefulness"]


class Wakefulness:
    """Measures stalls against a pulse that the shell promises to keep.

    Args:
        now: time of construction, in seconds.
        pulse: longest time between two calls of `awake` while the loop is not stalled, in seconds.
    """

    def __init__(self, now: float, pulse: float) -> None:
        self._last = now
        self.pulse = pulse

    def awake(self, now: float) -> float:
        """The coordinator runs at `now`: returns the seconds for which it surely did not run before, 0 for none."""
        gap = now - self._last
        self._last = now
        return gap if gap > 2 * self.pulse else 0.0
