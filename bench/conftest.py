"""What every benchmark gets: processes that begin with nothing but the interpreter, as users' do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.every_test import no_leaked_threads, private_flight_records
from support.python_process import fresh

__all__ = ["no_leaked_threads", "private_flight_records"]


@pytest.fixture(autouse=True)
def fresh_processes() -> Iterator[None]:
    """Worker processes are not forked from one that has loaded Paceline."""
    with fresh():
        yield
