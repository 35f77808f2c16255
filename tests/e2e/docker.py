"""A Docker engine for tests: the one that is there, or one that is started for them where that is asked for.

Nothing is installed or started behind anybody's back: without an engine tests skip. REQUIRE=containers says that this
is a test machine: then an engine is brought up (root), and whatever keeps it from working is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.needs import is_required, missing

__all__ = ["BUILD", "build", "build_etcd", "compose_command", "engine"]

BUILD = {"DOCKER_BUILDKIT": "0"}
"""Not every engine has BuildKit: the Dockerfile promises to work with both."""

_HERE = Path(__file__).parent

_UP_TIMEOUT_S = 900.0
"""Installing an engine and a Debian base takes minutes on a slow mirror."""


@contextmanager
def engine() -> Iterator[None]:
    """For the block an engine answers; skips the test, or fails it, where there can be none."""
    if _answers():
        yield
        return
    if not is_required("containers"):
        pytest.skip("no Docker engine answers (REQUIRE=containers starts one on a test machine)")
    state = Path(os.environ.get("PACELINE_LAB", tempfile.gettempdir())) / "paceline-docker"
    try:
        up = subprocess.run(
            ["bash", _HERE / "docker_up.sh", state], capture_output=True, text=True, timeout=_UP_TIMEOUT_S
        )
        if up.returncode:
            pytest.fail(f"no Docker engine, and none could be started:\n{up.stdout}{up.stderr}")
        yield
    finally:
        subprocess.run(["bash", _HERE / "docker_down.sh"], capture_output=True, timeout=60)


def build(image: str, *, target: str | None = None) -> None:
    """Builds the image of deploy/Dockerfile, or one of its stages, under that name."""
    command = [
        "docker",
        "build",
        "-t",
        image,
        *(["--target", target] if target else []),
        "-f",
        "deploy/Dockerfile",
        ".",
    ]
    environment = os.environ | BUILD
    root = _HERE.parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=_UP_TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-8000:]}{done.stderr[-8000:]}"


def build_etcd(image: str) -> None:
    """Makes an image of this machine's etcd (Debian's etcd-server and etcd-client).

    It is laid out as etcd's own image is: it has no shell and no user, the commands are in /usr/local/bin, and
    /var/lib/etcd is empty.
    """
    commands = [shutil.which(name) for name in ("etcd", "etcdctl")]
    if None in commands:
        missing("containers", "etcd is not installed (etcd-server and etcd-client)")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "var/lib/etcd").mkdir(parents=True)
        (root / "usr/local/bin").mkdir(parents=True)
        for command in filter(None, commands):
            shutil.copy(command, root / "usr/local/bin")
            linked = subprocess.run(["ldd", command], capture_output=True, text=True, check=True).stdout
            for library in (word for word in linked.split() if word.startswith("/")):
                (root / library.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, root / library.lstrip("/"))
        changes = ("ENV PATH=/usr/local/bin", "WORKDIR /var/lib/etcd", 'CMD ["/usr/local/bin/etcd"]')
        tar = subprocess.run(["tar", "-C", root, "-c", "."], capture_output=True, check=True).stdout
        words = ["docker", "import", *(word for change in changes for word in ("-c", change)), "-", image]
        done = subprocess.run(words, input=tar, capture_output=True, timeout=_UP_TIMEOUT_S)
    assert done.returncode == 0, done.stderr.decode()


def compose_command() -> list[str]:
    """Compose v2 if it is installed, else docker-compose."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    return missing("containers", "neither `docker compose` nor docker-compose is installed")


def _answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode == 0
