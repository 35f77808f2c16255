"""A minute in a storm of faults; `make soak` is the same for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_minute_of_faults(tmp_path: Path) -> None:
    soak(60, 1, tmp_path, print)
