"""Runs one stage of the tests, as `make test-slow` does: python tests/stages.py slow. Without a name it lists them all.

Each of pytest's processes takes seconds to load all files, so a stage for one mark is given only the files that name it
(`support/every_test.py` checks that a file names these itself).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NEWEST = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline", "torch-newest")
PYTORCH = (
    "tests/pytorch",
    "integrations/accelerate",
    "integrations/lightning",
    "integrations/torchrun",
    "integrations/transformers",
)
_NEWEST = (*PYTORCH, "integrations/torchtitan")

_MOST = 8
"""Most processes at a time."""

_PACKAGES = ("client", "server", "protocol", "protos")


class Stage(NamedTuple):
    """One stage.

    Attributes:
        about: what it runs, in words.
        marks: pytest's expression for its tests.
        per_core: processes for each core; 0 for one test after the other.
        named: only files that name this mark or need; all if empty.
        folders: where its tests are; those of PyTorch's folders are only run if they are named here.
        apart: run the tests marked `alone` one by one, after the others.
        venv: the environment.
        requires: a need whose absence is a failure, not a skip (`support/needs.py`).
    """

    about: str
    marks: str
    per_core: float = 0
    named: str = ""
    folders: tuple[str, ...] = ()
    apart: bool = False
    venv: str = ".venv"
    requires: str = ""


def _needs(what: str) -> str:
    return f"needs(what='{what}')"


_ROOT = f"{_needs('root')} and not exhaustive"

STAGES = {
    "fast": Stage(
        "all that need neither root nor containers nor torch (the last part of make test)",
        "not needs and not slow and not exhaustive",
        per_core=2,  # they wait half of the time
        apart=True,
    ),
    "slow": Stage(
        "the slow ones",
        "slow and not needs and not exhaustive",
        per_core=3,
        named="slow",
        apart=True,
    ),
    "exhaustive": Stage(
        "by hand: in full what .ci/run samples: all arguments, many more schedules",
        f"exhaustive and not {_needs('torch')} and not {_needs('root')}",
        per_core=2,
    ),
    "root-together": Stage("those that need root and can run side by side", f"{_ROOT} and not alone", 2, "root"),
    "root-alone": Stage("the others that need root", f"{_ROOT} and alone", named="root"),
    "slurm": Stage(
        "training under a real Slurm (root; needs slurmctld, slurmd, slurm-client and munge)",
        _needs("slurm"),
        per_core=2,
        named="slurm",
    ),
    "containers": Stage("those that need a Docker engine", _needs("containers"), named="containers"),
    "browser": Stage(
        "the page in headless Chromium, and the alerts (promtool)",
        f"{_needs('browser')} and not exhaustive",
        named="browser",
    ),
    "etcd": Stage(
        "several coordinators, with a real etcd (etcd-server, etcd-client)",
        f"{_needs('etcd')} and not exhaustive",
        per_core=2,
        folders=("tests/etcd", "tests/upgrade"),
        requires="etcd",
    ),
    "peers": Stage(
        "the engine mpi under mpirun, and whether Gloo and Open MPI can be measured (needs openmpi-bin)",
        f"{_needs('peers')} and not exhaustive",
        named="peers",
        venv=".venv-peers",
        requires="peers",
    ),
    "ray": Stage(
        "workers on Ray: a cluster of three raylets on this machine",
        _needs("ray"),
        named="ray",
        venv=".venv-ray",
        requires="ray",
    ),
    "torch": Stage(
        "those that need PyTorch, and PyTorch's own suite",
        f"{_needs('torch')} and not exhaustive",
        per_core=1.5,
        folders=PYTORCH,
        apart=True,
        venv=".venv-peers",
        requires="torch",
    ),
    "torch-exhaustive": Stage(
        "by hand: exhaustive ones for PyTorch, and PyTorch's own suite with 2, 3 and 4 ranks",
        f"exhaustive and {_needs('torch')}",
        folders=PYTORCH,
        venv=".venv-peers",
        requires="torch",
    ),
    "newest": Stage(
        "whether the newest PyTorch of the registry works too",
        "newest",
        per_core=1.5,
        folders=_NEWEST,
        venv=str(NEWEST),
        requires="torch",
    ),
    "newest-exhaustive": Stage(
        "by hand: torch-exhaustive with the newest PyTorch",
        f"exhaustive and {_needs('torch')}",
        folders=_NEWEST,
        venv=str(NEWEST),
        requires="torch",
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
            text = file.read_text()
            if (folders or not path.startswith(PYTORCH)) and (f"mark.{mark}" in text or f'(what="{mark}")' in text):
                found.append(path)
    return found


def main() -> int:
    """Runs the named stage, all its commands though one fails; returns the exit code of the first that does, else 0."""
    if not sys.argv[1:]:
        print("\n".join(f"{name}\t{stage.about}" for name, stage in STAGES.items()))
        return 0
    os.chdir(ROOT)
    stage = STAGES[sys.argv[1]]
    required = filter(None, (os.environ.get("REQUIRE"), stage.requires))
    environment = dict(os.environ) | {"REQUIRE": ",".join(required)}
    if stage.venv == str(NEWEST):  # another clone may have installed its code there: ours comes first
        plug_ins = sorted(map(str, (ROOT / "integrations").glob("*")))
        environment["PYTHONPATH"] = os.pathsep.join([*(str(ROOT / name) for name in _PACKAGES), *plug_ins])
    codes = []
    for command in commands(stage):
        print(shlex.join(command), flush=True)
        codes.append(subprocess.run(command, env=environment).returncode)
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
