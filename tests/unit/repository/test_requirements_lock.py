"""What the image installs is locked: every version by its hashes, and nothing else comes in."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
LIBRARY = SETTINGS["project"]["dependencies"] + SETTINGS["project"]["optional-dependencies"]["http"]
LOCKS = {
    "requirements.lock": LIBRARY,
    "requirements-demo.lock": SETTINGS["project"]["optional-dependencies"]["demo"],
    "requirements-build.lock": SETTINGS["build-system"]["requires"],
}
LINE = re.compile(r"([a-z0-9-]+)==([\w.]+)((?: --hash=sha256:[0-9a-f]{64})+)")


def locked(name: str) -> dict[str, str]:
    """Versions by name."""
    head, *lines = (ROOT / "deploy" / name).read_text().splitlines()
    assert head.startswith("# Made by deploy/lock.py")
    found = [LINE.fullmatch(line) for line in lines]
    assert None not in found, "nothing but versions and hashes"
    return {line[1]: line[2] for line in found if line}


@pytest.mark.parametrize("name", LOCKS)
def test_each_requirement_is_locked_at_an_allowed_version(name: str) -> None:
    versions = locked(name)
    for wanted in map(Requirement, LOCKS[name]):
        assert versions[canonicalize_name(wanted.name)] in wanted.specifier, f"{wanted}: run make lock"


def test_no_package_is_in_both_library_and_demo_locks() -> None:
    assert not set(locked("requirements.lock")) & set(locked("requirements-demo.lock"))


def test_the_image_installs_only_locked_packages() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    installs = [
        part
        for line in lines
        if line.startswith("RUN ")
        for part in line.split("&&")
        if re.search(r"pip\b.*\b(install|wheel)\b", part)
    ]
    assert len(installs) == 5
    for install in installs:
        assert "--no-deps" in install
        assert any(flag in install for flag in ("--require-hashes", "--no-index", "--no-build-isolation")), install
