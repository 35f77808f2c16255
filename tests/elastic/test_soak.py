"""Half a minute in a storm of faults; `make soak` is the same for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.soak import soak


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
def test_soak_for_30_seconds(tmp_path: Path) -> None:
    soak(30, 1, tmp_path, print)


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_soak_of_a_sharded_state_for_20_seconds(tmp_path: Path) -> None:
    soak(20, 8, tmp_path, print, "full_shard")
