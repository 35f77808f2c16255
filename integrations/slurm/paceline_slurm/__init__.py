"""Tells `srun paceline run` what Slurm says: nodes, workers, the job's name, the end, and where launchers meet.

The entry point "slurm" in the group "paceline.hosts" is `host`. docs/how-to/slurm.md is for users.
"""

from __future__ import annotations

import functools
import os

from paceline.launch import Host
from paceline_slurm._coordinator import coordinator_of_step
from paceline_slurm._step import slurm_step

__all__ = ["host"]


def host() -> Host | None:
    """Returns what Slurm tells this task of a step; None if srun has not started this process.

    Raises:
        ValueError: a variable of Slurm's is missing or malformed; the text names it.
    """
    step = slurm_step(os.environ)
    if step is None:
        return None
    return Host(
        "Slurm job",
        job=step.name,
        workers=step.workers,
        launchers=step.tasks,
        cores=step.cpus,
        ends_at=step.ends_at,
        coordinator=functools.partial(coordinator_of_step, step) if step.tasks > 1 else None,
    )
