"""Each Python of the classifiers that this machine has, and the oldest dependencies that pyproject.toml allows.

Each has an environment that outlives this clone, so pip downloads little. A Python that is not here is skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [
    *PROJECT["dependencies"],
    *(need for extra in ("demo", "http") for need in PROJECT["optional-dependencies"][extra]),
]
VERSIONS = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["classifiers"]))
THIS = f"3.{sys.version_info.minor}"

IMPORT_ALL = """
import importlib, pkgutil
extras = {"torch", "matplotlib", "mpi4py", "cryptography", "aiohttp", "prometheus_client"}
count = 0
for package in ("paceline", "paceline_server", "paceline_protocol", "pacelinepb"):
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not info.name.endswith("__main__"):
            try:
                importlib.import_module(info.name)
                count += 1
            except ModuleNotFoundError as error:
                assert (error.name or "").partition(".")[0] in extras, error
assert count > 100, count
"""


def python_of(version: str) -> Path:
    """The interpreter on the path or among pyenv's; skips the test if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0:
            return Path(found)
    pytest.skip(f"there is no Python {version} here")


def environment(name: str, python: Path, needed: list[str]) -> Path:
    """An environment with these packages, made once for this machine; returns its interpreter."""
    folder = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline") / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another clone's tests may want it too
        inside = folder / "bin" / "python"
        if subprocess.run([inside, "-c", ""], capture_output=True).returncode if inside.exists() else True:
            subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([inside, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *needed], check=True)
    return inside


def check(python: Path, warnings: str = "error") -> None:
    """All modules can be imported; the command line answers; the demo learns what it should.

    Args:
        python: the interpreter.
        warnings: what becomes of warnings as modules are imported.
    """
    sources = os.pathsep.join(str(ROOT / part) for part in ("client", "server", "protocol", "protos"))
    variables = {**os.environ, "PYTHONPATH": sources}

    def run(*arguments: str) -> str:
        done = subprocess.run([python, *arguments], env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-W", warnings, "-c", IMPORT_ALL)
    assert "demo" in run("-m", "paceline", "--help")
    assert "--kill-at-step" in run("-m", "paceline", "demo", "--help")
    told = json.loads(run("-m", "paceline", "demo", "--workers", "2", "--json").splitlines()[-1])
    assert told["samples_once"]
    assert told["accuracy"] > 0.95


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != THIS])
def test_paceline_works_with_other_supported_pythons(version: str) -> None:
    check(environment(f"python-{version}", python_of(version), NEEDED))


def test_paceline_works_with_the_oldest_dependencies() -> None:
    """Those that pyproject.toml names, each at its floor; what they need in turn is the newest that they allow."""
    oldest = [re.sub(r">=([\w.]+).*", r"==\1", need) for need in NEEDED]
    assert all("==" in need for need in oldest), oldest
    check(environment(f"python-{THIS}-oldest", Path(sys.executable), oldest), "default")  # theirs are not ours


def test_the_classifiers_start_with_the_minimum_python() -> None:
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"
    assert [f"3.{minor}" for minor in range(11, 11 + len(VERSIONS))] == VERSIONS
