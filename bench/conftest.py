"""Gives every benchmark worker processes that begin with only the interpreter, as users' workers do."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from support.python_process import fresh


@pytest.fixture(autouse=True)
def fresh_processes() -> Iterator[None]:
    """Starts worker processes without forking one that has loaded Paceline; garbage is looked for everywhere again."""
    gc.unfreeze()  # `support.every_test` has kept what was loaded out of it
    with fresh():
        yield
