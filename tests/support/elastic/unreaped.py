"""A trainer (`trainer.py`) whose parent does not reap it: when it has ended it is a zombie.

This process is the parent. It does nothing, and the trainer ends with it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)

if os.fork():
    for stream in range(3):
        os.close(stream)
    while True:
        signal.pause()
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
runpy.run_path(str(Path(__file__).with_name("trainer.py")), run_name="__main__")
