"""Half a minute in a storm of faults; `make soak` is the same for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.soak import soak


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
def test_half_a_minute_of_faults(tmp_path: Path) -> None:
    soak(30, 1, tmp_path, print)


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_a_third_of_a_minute_while_the_state_is_spread(tmp_path: Path) -> None:
    soak(20, 8, tmp_path, print, "full_shard")
