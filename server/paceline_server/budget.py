"""Who may hold how much of a memory that all share. Pure.

Each may hold at most as much as is left free for all others: one that takes all it can has half, two that do have a
third each, and whoever comes after them finds as much free (Choudhury and Hahne, "Dynamic Queue Length Thresholds for
Shared-Memory Packet Switches", 1998). So nobody is given a share that he does not use, and nobody takes everything.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Budget"]


class Budget:
    """Bytes, and who holds them.

    Args:
        total: bytes for all together.

    Attributes:
        total: as given.
        used: bytes that are held.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._held: dict[Hashable, int] = {}

    def held(self, who: Hashable) -> int:
        """Bytes that one holds."""
        return self._held.get(who, 0)

    def take(self, who: Hashable, size: int, spare: int = 0) -> bool:
        """Gives somebody so many bytes more. False if that would be more than is then left free; he has none of it.

        Args:
            who: in whose name.
            size: bytes.
            spare: bytes that he must be able to take afterwards.
        """
        most = size + spare
        if self.held(who) + most > self.total - self.used - most:
            return False
        self.add(who, size)
        return True

    def add(self, who: Hashable, size: int) -> None:
        """Counts what somebody holds already, or gives back (below 0)."""
        self.used += size
        self._held[who] = self.held(who) + size
        if not self._held[who]:
            del self._held[who]
