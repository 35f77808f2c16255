"""The tests on Ray share a cluster. Without Ray they are not collected (REQUIRE=ray: an error)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.needs import is_required

if TYPE_CHECKING:
    from support.ray_cluster import RayNodes

if find_spec("ray") is None:
    if is_required("ray"):
        raise RuntimeError("REQUIRE=ray, and Ray is not installed")
    collect_ignore = ["test_ray_run.py", "test_ray_replicas.py", "test_ray_train.py"]


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayNodes]:
    """Three raylets on this machine, with room for one worker each."""
    from support.ray_cluster import RayNodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parents[3] / 'tests'}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        made = RayNodes()
        try:
            made.start()
            yield made
        finally:
            made.stop()
