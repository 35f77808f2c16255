"""How much of the machine this process uses, for its heartbeats."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STATM = Path("/proc/self/statm")


class ProcessUsage:
    """Processor time and memory of this process, without its children."""

    def __init__(self) -> None:
        self._before = time.monotonic(), time.process_time()
        self._cores = 0.0

    def cores(self) -> float:
        """Returns the processor time since the last call, in cores: 1 is all the time of one core."""
        now = time.monotonic(), time.process_time()
        if (passed := now[0] - self._before[0]) > 0:
            self._cores, self._before = (now[1] - self._before[1]) / passed, now
        return self._cores

    @staticmethod
    def memory() -> int:
        """Returns the bytes of resident memory; 0 on systems other than Linux."""
        try:
            return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0
