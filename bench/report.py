"""Prints the tables of docs/performance.md in markdown: python bench/report.py [--vs gloo,openmpi] [--seconds 2].

It measures a training step, and all_reduce in shared memory beside the named implementations. Run it on an otherwise
idle machine; it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for `support`, which a script does not find

import numpy as np

import paceline
from paceline.cli.sizes import parse_sizes, size_text
from test_ddp_figures import ALONE, compared, over

COMPARE = Path(__file__).with_name("compare.py")

SIZES = "1KiB,64KiB,1MiB,4MiB,16MiB,64MiB"

NAMES = {"gloo": "Gloo", "openmpi": "Open MPI", "any": "Paceline, any arrays", "group": "Paceline, `group.empty()`"}


def all_reduce(world: int, vs: str, seconds: float) -> str:
    """Tabulates an all_reduce's median time or bus bandwidth by size and implementation, one run per memory."""
    cells: dict[tuple[int, str], str] = {}
    for memory, others in (("group", ""), ("any", vs)):
        options = ["-n", str(world), "--sizes", SIZES, "--links", "shm", "--memory", memory, "--seconds", str(seconds)]
        words = [sys.executable, str(COMPARE), "all-reduce", *options, "--vs", others, "--json"]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        for row in json.loads(done.stdout.splitlines()[-1])["rows"]:
            column = memory if row["impl"] == "paceline" else row["impl"]
            cells[row["bytes"], column] = _cell(row)
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = [[size_text(size), *(cells[size, column] for column in columns)] for size in parse_sizes(SIZES)]
    return table([f"all_reduce, W={world}", *(NAMES[column] for column in columns)], rows)


def step(worlds: Sequence[int]) -> str:
    """Tabulates what communication adds to a training step of NumPy's DDP, by the wall clock and by CPU time."""
    rows = []
    for world in worlds:
        times = compared({**ALONE, "DDP": "paceline.DDP(model(), group)"}, world=world)
        alone, ddp = (statistics.median(wall for wall, _ in times[way]) for way in ("alone", "DDP"))
        more = [f"{over(times, 'DDP', column):+.1%}" for column in (0, 1)]
        rows.append([str(world), f"{alone:.0f} ms", f"{ddp:.0f} ms", *more])
    return table(["W", "without communication", "DDP", "wall clock", "CPU time"], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """Describes the machine and the versions in one line."""
    versions = f"Paceline {paceline.__version__}, CPython {platform.python_version()}, NumPy {np.__version__}"
    return f"{len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}; {versions}"


def _cell(row: dict[str, Any]) -> str:
    return f"{row['median_us']:,.0f} us" if row["bytes"] < 1 << 20 else f"{row['busbw_GBps']:.1f} GB/s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vs", default="", help="other implementations, separated by commas: gloo, openmpi")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds to measure for each row")
    asked = parser.parse_args()
    print(f"{machine()}\n")
    for size in (2, 4):
        print(all_reduce(size, asked.vs, asked.seconds), end="\n\n", flush=True)
    print(step((2, 4)))
