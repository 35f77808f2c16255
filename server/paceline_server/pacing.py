"""How fast one caller is served: a caller that sends faster than that is read more slowly. Pure.

No caller is refused for being fast: an honest burst is delayed for a moment, and a flood waits in its sender's own
buffers (HTTP/2 flow control) while all others are served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["Pacer", "Pacers"]


class Pacer:
    """A token bucket: so many messages at once, then so many a second.

    Args:
        rate: messages a second.
        burst: messages that may come at once.
        now: the time, in seconds.
    """

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def delay(self, now: float) -> float:
        """Counts one message; returns the seconds to wait before it is served, 0 in most cases."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - 1.0
        self._at = now
        return max(0.0, -self._tokens / self._rate)


class Pacers:
    """A pacer for each caller. Those that have been quiet longest are forgotten first, and start with a full bucket.

    Args:
        rate, burst: of each.
        most: callers that are remembered.
    """

    def __init__(self, rate: float, burst: float, most: int) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most
        self._pacers: OrderedDict[Hashable, Pacer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pacers)

    def delay(self, caller: Hashable, now: float) -> float:
        """See `Pacer.delay`."""
        pacer = self._pacers.get(caller)
        if pacer is None:
            pacer = self._pacers[caller] = Pacer(self._rate, self._burst, now)
            if len(self._pacers) > self._most:
                self._pacers.popitem(last=False)
        self._pacers.move_to_end(caller)
        return pacer.delay(now)
