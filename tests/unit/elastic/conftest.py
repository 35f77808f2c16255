"""A session of one worker, without a coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from unit.elastic.solo import ENVIRONMENT

import paceline


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    with paceline.join() as joined:
        yield joined
