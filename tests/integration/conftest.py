"""Fixtures of the integration tests."""

from __future__ import annotations

import pytest

from support.worlds import EACH_LINK


@pytest.fixture(params=EACH_LINK)
def link(request: pytest.FixtureRequest) -> str:
    """A kind of link; each test that asks for it runs over every one."""
    return str(request.param)
