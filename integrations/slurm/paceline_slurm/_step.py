"""Reads what Slurm tells the tasks of `srun paceline run`: nodes, workers, the job's name, the coordinator, the end.

Pure. Source of the variables and of the syntax of host lists: srun(1) and scontrol(1), "hostnames".
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

_FIRST_PORT, _PORTS = 20_000, 10_000
"""Ports for coordinators of steps: below those that Linux gives to connections that leave (32768 and up)."""

_MOST_HOSTS = 1 << 16
"""Slurm's own limit on the hosts of a list (MAX_RANGE of its hostlist.h)."""

_PART = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
"""One item of a list of hosts: a name, in which brackets may stand."""


def expand_hostlist(text: str) -> list[str]:
    """Returns the hosts of a list such as "n[1-3,07],login", in its order.

    A bracket holds numbers and ranges, whose leading zeros stay. A host may have several brackets, and the last one
    counts fastest.

    Raises:
        ValueError: the text is no such list, or has more than 65,536 hosts.
    """
    if not re.fullmatch(f"{_PART}(?:,{_PART})*", text):
        raise ValueError(f"{text[:100]!r} is no list of hosts")
    hosts: list[str] = []
    for part in re.findall(_PART, text):
        names = [""]
        for literal, bracket in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            names = _combined(names, [literal] if literal else _numbers(bracket, text), text)
        hosts += names
        if len(hosts) > _MOST_HOSTS:
            raise ValueError(f"{text[:100]!r} has more than {_MOST_HOSTS} hosts")
    return hosts


def _combined(names: list[str], ends: list[str], text: str) -> list[str]:
    if len(names) * len(ends) > _MOST_HOSTS:
        raise ValueError(f"{text[:100]!r} has more than {_MOST_HOSTS} hosts")
    return [name + end for name in names for end in ends]


def _numbers(bracket: str, text: str) -> list[str]:
    found: list[str] = []
    for item in bracket.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
        if match is None:
            raise ValueError(f"{text[:100]!r} is no list of hosts: [{bracket[:100]}] has no numbers or ranges")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS - len(found):
            raise ValueError(f"{text[:100]!r} is no list of hosts: {item} is no range, or too long")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """One task of a step that srun has started: this launcher, and where the step's others are.

    Attributes:
        name: the name of Slurm's job.
        hosts: the nodes of the step, in Slurm's order.
        task: the number of this task (SLURM_PROCID).
        tasks: how many tasks, and so launchers, the step has.
        workers: workers for this launcher: one for each GPU of the task, else one for each processor of the task.
        port: where the step's coordinator listens on the first node.
        ends_at: when the job's time is over, in seconds since the epoch; None if Slurm does not tell (before 23.02).
    """

    name: str
    hosts: tuple[str, ...]
    task: int
    tasks: int
    cpus: int
    workers: int
    port: int
    ends_at: float | None = None

    @property
    def serves(self) -> bool:
        """True if this launcher serves the coordinator of its step, unless another one is named."""
        return self.task == 0


def slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """Returns the step in which this process is a task; None if srun has not started it.

    The port follows from the numbers of job and step, so that all tasks find it alone; PACELINE_SLURM_PORT overrides
    it.

    Raises:
        ValueError: a variable is missing or malformed; the text names it.
    """
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_PROCID" not in environ:
        return None
    job_id, step_id = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID", 0)
    try:
        hosts = expand_hostlist(environ["SLURM_STEP_NODELIST"])
    except ValueError as error:
        raise ValueError(f"SLURM_STEP_NODELIST: {error}") from None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    per_node = max(1, -(-tasks // len(hosts)))  # without gaps, the most that a node of the step has
    cpus = _number(environ, "SLURM_CPUS_PER_TASK", 0) or max(1, _number(environ, "SLURM_CPUS_ON_NODE", 1) // per_node)
    gpus = _number(environ, "SLURM_GPUS_ON_NODE", 0) // per_node
    port = _number(environ, "PACELINE_SLURM_PORT", 0)
    if not port:
        port = _FIRST_PORT + zlib.crc32(f"{job_id}.{step_id}".encode()) % _PORTS
    elif port > 65_535:
        raise ValueError(f"PACELINE_SLURM_PORT must be 1 to 65535, not {port}")
    ends_at = _number(environ, "SLURM_JOB_END_TIME", 0)
    return SlurmStep(
        name=environ.get("SLURM_JOB_NAME") or str(job_id),
        hosts=tuple(hosts),
        task=_number(environ, "SLURM_PROCID"),
        tasks=tasks,
        cpus=cpus,
        workers=gpus or cpus,
        port=port,
        ends_at=float(ends_at) if ends_at else None,
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"{name} must be a number, not {text[:50]!r}")
    return int(text)
