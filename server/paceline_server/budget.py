"""A memory that all payers share, and how much of it one may hold. Pure.

A payer may hold at most as much as is left free: one that takes all it can gets half, two get a third each, and the
next one finds as much free (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
1998). So no memory is set aside for payers that do not use it, and none can take everything.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Budget"]


class Budget:
    """Bytes, and how many each payer holds.

    Args:
        total: bytes for all payers together.

    Attributes:
        total: as given.
        used: bytes that are held.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._held: dict[Hashable, int] = {}

    def held(self, who: Hashable) -> int:
        """Bytes that a payer holds."""
        return self._held.get(who, 0)

    def take(self, who: Hashable, size: int, spare: int = 0) -> bool:
        """Gives a payer more bytes. Gives none, and returns False, if it would then hold more than is left free.

        Args:
            who: the payer.
            size: bytes.
            spare: bytes that the payer must be able to take afterwards.
        """
        most = size + spare
        if self.held(who) + most > self.total - self.used - most:
            return False
        self.add(who, size)
        return True

    def add(self, who: Hashable, size: int) -> None:
        """Counts bytes that a payer holds already, or gives back (below 0)."""
        self.used += size
        self._held[who] = self.held(who) + size
        if not self._held[who]:
            del self._held[who]
