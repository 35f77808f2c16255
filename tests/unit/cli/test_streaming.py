"""Which copies go past the caches is said to workers as they start, unless their user has said it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.cli.bench.recipes import peer_recipe
from paceline.cli.launcher.environment import WorkerSettings, worker_environment
from paceline.cli.launcher.streaming import streaming_variables
from paceline.links.staging import STREAMED_BYTES

THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
SAID = f"{THRESHOLD}={STREAMED_BYTES}"
LOADER = Path("/lib64/ld-linux-x86-64.so.2")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GLIBC_TUNABLES": SAID}),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, {"GLIBC_TUNABLES": f"glibc.malloc.check=1:{SAID}"}),
        ({"GLIBC_TUNABLES": f"{THRESHOLD}=99999999"}, {}),
    ],
)
def test_the_users_own_tunables_stay(before: dict[str, str], after: dict[str, str]) -> None:
    assert streaming_variables(before) == after


def test_workers_and_whoever_is_measured_beside_them_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    worker = worker_environment({}, WorkerSettings("host:7400", "digits", 2, 4), 7)
    assert SAID in worker["GLIBC_TUNABLES"]
    assert all(SAID in peer_recipe(impl, 2).environment["GLIBC_TUNABLES"] for impl in ("gloo", "openmpi"))


@pytest.mark.skipif(not LOADER.exists(), reason="a tunable of glibc, and of x86-64")
def test_glibc_understands() -> None:
    """2.33 or later, which lists its tunables."""
    listed = subprocess.run([LOADER, "--list-tunables"], env=streaming_variables({}), capture_output=True, text=True)
    assert f"{THRESHOLD}: {STREAMED_BYTES:#x} " in listed.stdout
