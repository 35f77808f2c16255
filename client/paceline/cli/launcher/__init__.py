"""Starts workers, carries what they print, and answers for how they end.

What decides is pure; what acts is around it:
    lines.py        PURE: bytes from a pipe into whole lines
    environment.py  PURE: what a worker finds in its environment
    place.py        PURE: where workers stand in a world that is known before they start, and how torch is told
    cores.py        PURE: which cores a worker runs on
    outcome.py      PURE: how a process ended, in words and as an exit code
    restarts.py     PURE: who is started again, when, and who is given up
    supervision.py  PURE: when workers are to be stopped, and what the launcher's exit code is
    spares.py       PURE: how many warm processes there are, and when the next one is started
    shim.py         runs first in the child: ties its life to the launcher's, then runs the script
    worker.py       one child process with its pipes
    launcher.py     the shell around all that: one loop over pipes, exits and signals
    console.py      prefixed lines on the terminal and in log files
    reports.py      exits told to the coordinator
"""

from paceline.cli.launcher.environment import WorkerSettings, worker_bounds
from paceline.cli.launcher.launcher import Launcher, Listener
from paceline.cli.launcher.outcome import Exit
from paceline.cli.launcher.place import Place
from paceline.cli.launcher.supervision import Terms
from paceline.cli.launcher.worker import Worker

__all__ = ["Exit", "Launcher", "Listener", "Place", "Terms", "Worker", "WorkerSettings", "worker_bounds"]
