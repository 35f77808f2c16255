"""Runs one stage of the tests, as `make test-slow` does: python tests/stages.py slow. Without a name it lists them all.

Each of pytest's processes takes seconds to load all files, so a stage for one mark is given only the files that name it
(`support/every_test.py` checks that a file names these marks itself).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NEWEST = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline", "torch-newest")
PYTORCH = ("tests/pytorch", "integrations/torchrun")

_MOST = 8
"""Most processes at a time."""

_PACKAGES = ("client", "server", "protocol", "protos")


class Stage(NamedTuple):
    """One stage.

    Attributes:
        about: what it runs, in words.
        marks: pytest's expression for its tests.
        per_core: processes for each core; 0 for one test after the other.
        named: only files that name this mark; all if empty.
        folders: where its tests are; those of PyTorch's folders are only run if they are named here.
        apart: run the tests marked `alone` one by one, after the others.
        venv: the environment.
        requires: the variables REQUIRE_... that turn a skip into a failure.
    """

    about: str
    marks: str
    per_core: float = 0
    named: str = ""
    folders: tuple[str, ...] = ()
    apart: bool = False
    venv: str = ".venv"
    requires: str = ""


_ROOT = "root and not exhaustive and not containers and not slurm and not etcd"

STAGES = {
    "fast": Stage(
        "all that need neither root nor containers nor torch (the last part of make test)",
        "not exhaustive and not torch and not ray and not slow and not root and not containers and not browser "
        "and not etcd",
        per_core=2,  # they wait half of the time
        apart=True,
    ),
    "slow": Stage(
        "the slow ones",
        "slow and not ray and not exhaustive and not root and not containers and not peers and not browser",
        per_core=3,
        named="slow",
        apart=True,
    ),
    "exhaustive": Stage(
        "by hand: in full what .ci/run samples: all arguments, many more schedules",
        "exhaustive and not torch and not root",
        per_core=2,
    ),
    "root-together": Stage("those that need root and can run side by side", f"{_ROOT} and not alone", 2, "root"),
    "root-alone": Stage("the others that need root", f"{_ROOT} and alone", named="root"),
    "slurm": Stage(
        "training under a real Slurm (root; needs slurmctld, slurmd, slurm-client and munge)", "slurm", 2, "slurm"
    ),
    "containers": Stage("those that need a Docker engine", "containers", named="containers"),
    "browser": Stage(
        "the page in headless Chromium, and the alerts (promtool)", "browser and not exhaustive", named="browser"
    ),
    "etcd": Stage(
        "several coordinators, with a real etcd (etcd-server, etcd-client)",
        "etcd and not exhaustive",
        per_core=2,
        folders=("tests/etcd", "tests/upgrade"),
        requires="REQUIRE_ETCD",
    ),
    "peers": Stage(
        "the engine mpi under mpirun, and whether Gloo and Open MPI can be measured (needs openmpi-bin)",
        "peers and not exhaustive",
        named="peers",
        venv=".venv-peers",
        requires="REQUIRE_PEERS",
    ),
    "ray": Stage(
        "workers on Ray: a cluster of three raylets on this machine",
        "ray",
        named="ray",
        venv=".venv-ray",
        requires="REQUIRE_RAY",
    ),
    "torch": Stage(
        "those that need PyTorch, and PyTorch's own suite",
        "torch and not exhaustive",
        per_core=1.5,
        folders=PYTORCH,
        apart=True,
        venv=".venv-peers",
        requires="REQUIRE_TORCH",
    ),
    "torch-exhaustive": Stage(
        "by hand: exhaustive ones for PyTorch, and PyTorch's own suite with 2, 3 and 4 ranks",
        "exhaustive and torch",
        folders=PYTORCH,
        venv=".venv-peers",
        requires="REQUIRE_TORCH",
    ),
    "newest": Stage(
        "whether the newest PyTorch of the registry works too",
        "newest",
        per_core=1.5,
        folders=PYTORCH,
        venv=str(NEWEST),
        requires="REQUIRE_TORCH",
    ),
    "newest-exhaustive": Stage(
        "by hand: torch-exhaustive with the newest PyTorch",
        "exhaustive and torch",
        folders=PYTORCH,
        venv=str(NEWEST),
        requires="REQUIRE_TORCH",
    ),
}


def commands(stage: Stage) -> list[list[str]]:
    """Lists the commands of a stage, which are run one after the other."""
    if not stage.apart:
        return [_command(stage, stage.marks, stage.per_core, stage.named)]
    together = _command(stage, f"{stage.marks} and not alone", stage.per_core, stage.named)
    return [together, _command(stage, f"{stage.marks} and alone", 0, "alone")]


def _command(stage: Stage, marks: str, per_core: float, named: str) -> list[str]:
    words = [str(ROOT / stage.venv / "bin" / "pytest"), "-m", marks]
    if per_core:
        processes = min(_MOST, max(1, int(per_core * (os.cpu_count() or 1))))
        words += ["-n", str(processes), "--dist", "worksteal"]
    return [
        *words,
        *(_naming(named, stage.folders) if named else [each for each in stage.folders if Path(each).exists()]),
    ]


def _naming(mark: str, folders: tuple[str, ...]) -> list[str]:
    """Finds the test files that name a mark; without folders in all but PyTorch's."""
    found = []
    for folder in folders or ("tests", "integrations"):
        for file in sorted((ROOT / folder).rglob("test_*.py")):
            path = str(file.relative_to(ROOT))
            if (folders or not path.startswith(PYTORCH)) and re.search(rf"mark\.{mark}\b", file.read_text()):
                found.append(path)
    return found


def main() -> int:
    """Runs the named stage; returns the exit code of the first command that fails, else 0."""
    if not sys.argv[1:]:
        print("\n".join(f"{name}\t{stage.about}" for name, stage in STAGES.items()))
        return 0
    os.chdir(ROOT)
    stage = STAGES[sys.argv[1]]
    environment = dict(os.environ) | ({stage.requires: "1"} if stage.requires else {})
    if stage.venv == str(NEWEST):  # another clone may have installed its code there: ours comes first
        plug_ins = sorted(map(str, (ROOT / "integrations").glob("*")))
        environment["PYTHONPATH"] = os.pathsep.join([*(str(ROOT / name) for name in _PACKAGES), *plug_ins])
    for command in commands(stage):
        print(shlex.join(command), flush=True)
        if code := subprocess.run(command, env=environment).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
