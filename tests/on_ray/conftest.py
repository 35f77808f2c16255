"""Where Ray is not installed, nothing here is collected (REQUIRE_RAY=1: an error). All tests share one cluster.

Pytest's own folder of this name is not `ray`, which would hide the package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.ray_cluster import RayNodes

if find_spec("ray") is None:
    if os.environ.get("REQUIRE_RAY") == "1":
        raise RuntimeError("REQUIRE_RAY=1, and Ray is not installed")
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayNodes]:
    """Three raylets on this machine, with room for one worker each."""
    from support.ray_cluster import RayNodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        made = RayNodes()
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture(autouse=True)
def three_nodes(nodes: RayNodes) -> None:
    """Each test begins with three nodes. Ray's threads are there before it, and no leak of it."""
    while len(nodes.others) < 2:
        nodes.add()
