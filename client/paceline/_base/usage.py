"""How much of the machine this process uses, for its heartbeats."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")

_LEAST_S = 0.1
"""Calls closer together than that get the last value: over a millisecond, cores jump."""


class ProcessUsage:
    """Processor time and memory of this process, without its children; tests pass clocks of their own, in seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processor_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._processor_clock = clock, processor_clock
        self._before = clock(), processor_clock()
        self._cores = 0.0

    def cores(self) -> float:
        """Returns the processor time since the last value was taken, in cores: 1 is all the time of one core.

        A value is taken every 0.1 s at most, the first one 0.1 s after the start; until then it is 0.
        """
        now = self._clock(), self._processor_clock()
        if (passed := now[0] - self._before[0]) >= _LEAST_S:
            self._cores, self._before = (now[1] - self._before[1]) / passed, now
        return self._cores

    @staticmethod
    def memory() -> int:
        """Returns the bytes of resident memory; 0 on systems other than Linux."""
        try:
            return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0
