"""Starts workers, passes on what they print, and computes the exit code from how they end.

`paceline.launch` decides what to do when a worker ends, and what it finds in its environment. Here lies:
    spares.py       PURE: how many spare processes there are, and when they start
    shim.py         runs first in the child: ties its life to the launcher's, then runs the script
    worker.py       one child process with its pipes
    printed.py      PURE: what workers print as lines, and as states of progress bars
    last_lines.py   PURE: the last of these lines
    notices.py      PURE: sentences that all workers say, once
    live_rows.py    PURE: the last rows of a terminal, which show those states
    torch_worlds.py the world of torch.distributed of each replica, or of all workers, with its port
    launcher.py     the shell: one loop over pipes, exits and signals
    console.py      prefixed lines on the terminal and in log files
    reports.py      reports exits to the coordinator
"""

from paceline.cli.launcher.launcher import Launcher
from paceline.cli.launcher.printed import Printed
from paceline.cli.launcher.worker import Worker
from paceline.launch._environment import WorkerSettings, worker_bounds
from paceline.launch._supervision import Exit, Terms

__all__ = [
    "Exit",
    "Launcher",
    "Printed",
    "Terms",
    "Worker",
    "WorkerSettings",
    "worker_bounds",
]
