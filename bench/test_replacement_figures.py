"""Measures how soon `paceline run --restarts` replaces a failed worker, with a spare process and without one.

The time is from SIGKILL to the first line of the script in the new process; also with torch if it is installed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest
from e2e.spares import Job

from support.command import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMES = 7

SCRIPT = """
    import os, signal, time
    import installed
    print("here", os.getpid(), "at", time.monotonic(), flush=True)
    signal.pause()
"""


def replaced_in(folder: Path, imports: str, spares: int) -> float:
    """Returns the seconds until the first replacement runs; with a spare, it kills only once the spare is ready."""
    folder.mkdir()
    job = Job(folder, SCRIPT, package=f"import paceline._elastic, paceline._elastic.join, {imports}")
    run = ("run", "--coordinator", "127.0.0.1:1", "--restarts", "1", "--spares", str(spares), str(job.script))
    with command(*run, **job.environment) as launched:
        launched.wait_for(" at ")
        (worker,) = [int(pid) for pid in re.findall(r"here (\d+) at", launched.stdout)]
        if spares:
            job.spare({worker})
        killed = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        launched.wait_for(" at ", 2)
        return float(re.findall(r"at ([0-9.]+)", launched.stdout)[-1]) - killed


@pytest.mark.parametrize("imports", [name for name in ("numpy", "torch") if find_spec(name) is not None])
def test_a_spare_replaces_a_worker_faster_than_a_new_process(imports: str, tmp_path: Path) -> None:
    took: dict[int, list[float]] = {0: [], 1: []}
    for number in range(TIMES):
        for spares, seconds in took.items():
            seconds.append(replaced_in(tmp_path / f"{number}-{spares}", imports, spares))
    without, with_one = map(median, took.values())
    print(f"{imports}: {with_one:.2f} s with a spare, {without:.2f} s without")
    assert with_one < without
