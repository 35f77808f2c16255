#!/usr/bin/env python3
"""Locks the packages that the image installs, by name, version and hashes, without their origin.

    python3 deploy/lock.py

It writes three files beside this one: requirements.lock for the library with its extra `http`, requirements-demo.lock
for what the examples need in addition, and requirements-build.lock for what builds the wheel. pip chooses the versions
(`install --dry-run --report`) for the Python of deploy/Dockerfile on both platforms. Run it with that Python, because
the markers of dependencies depend on its version.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "3.11"
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = 36
"""The minor version of glibc in Debian 12, where wheels for a later one would not load."""

Lock = dict[str, tuple[str, set[str]]]
"""Maps a name to a version and its SHA-256 digests."""


def resolve(requirements: Iterable[str], within: Lock | None = None) -> Lock:
    """Returns what pip would install for the requirements; it exits if versions differ between machines.

    Args:
        requirements: requirements as in pyproject.toml.
        within: versions that are already chosen.
    """
    found: Lock = {}
    for machine in MACHINES:
        tags = [f"manylinux_2_{minor}_{machine}" for minor in range(5, NEWEST_GLIBC + 1)]
        tags += [f"manylinux2014_{machine}", f"linux_{machine}", "any"]
        with tempfile.TemporaryDirectory() as folder:
            pinned = Path(folder, "pinned")
            pinned.write_text("".join(f"{name}=={version}\n" for name, (version, _) in (within or {}).items()))
            words = ["install", "--dry-run", "--quiet", "--ignore-installed", "--only-binary", ":all:"]
            words += ["--python-version", PYTHON, "--implementation", "cp", "--target", folder, "--report", "-"]
            words += ["--constraint", str(pinned), *(word for tag in tags for word in ("--platform", tag))]
            done = subprocess.run(
                [sys.executable, "-m", "pip", *words, *requirements], stdout=subprocess.PIPE, check=True
            )
        for item in json.loads(done.stdout)["install"]:
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            version, hashes = found.setdefault(name, (item["metadata"]["version"], set()))
            if version != item["metadata"]["version"]:
                sys.exit(f"{name} is {version} on {MACHINES[0]} and {item['metadata']['version']} on {machine}")
            hashes.add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def write(name: str, lock: Lock) -> None:
    """Writes a lock file in pip's format."""
    lines = [f"# Made by deploy/lock.py: CPython {PYTHON}, Linux, {' and '.join(MACHINES)}.\n"]
    for package, (version, hashes) in sorted(lock.items()):
        lines.append(f"{package}=={version}{''.join(f' --hash=sha256:{digest}' for digest in sorted(hashes))}\n")
    (HERE / name).write_text("".join(lines))


def main() -> None:
    """Makes all three files."""
    settings = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    project = settings["project"]
    extras = project["optional-dependencies"]
    ours = project["dependencies"] + extras["http"]
    everything = resolve(ours + extras["demo"])
    library = resolve(ours, within=everything)
    write("requirements.lock", library)
    write("requirements-demo.lock", {name: entry for name, entry in everything.items() if name not in library})
    write("requirements-build.lock", resolve(settings["build-system"]["requires"]))


if __name__ == "__main__":
    main()
