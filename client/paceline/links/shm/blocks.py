"""Which parts of a segment are free: first fit, neighbours joined."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Blocks"]


class Blocks:
    """The free parts of `size` bytes. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._starts = [0]
        self._sizes = [size]

    @property
    def is_whole(self) -> bool:
        """True if all is free."""
        return self._sizes == [self._size]

    def take(self, size: int) -> int | None:
        """Takes the first part that is large enough; where it begins, None if there is none."""
        for at, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[at]
                if free == size:
                    del self._starts[at], self._sizes[at]
                else:
                    self._starts[at] += size
                    self._sizes[at] -= size
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Gives back what was taken."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and start + size == self._starts[at]:
            size += self._sizes[at]
            del self._starts[at], self._sizes[at]
        if at and self._starts[at - 1] + self._sizes[at - 1] == start:
            self._sizes[at - 1] += size
        else:
            self._starts.insert(at, start)
            self._sizes.insert(at, size)
