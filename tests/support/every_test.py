"""Fixtures of every test and benchmark: no thread is left behind, and records of failures stay with the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

__all__ = ["no_leaked_threads", "private_flight_records"]

# The loop thread and grpc's pollers live as long as the process; they are no leak.
_LASTING = ("paceline-loop", "grpc", "asyncio_", "Thread-grpc", "_poll_wrapper")


def _extra(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.is_alive() and not any(word in thread.name for word in _LASTING)
    ]


@pytest.fixture(autouse=True, scope="session")
def private_flight_records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Failures that tests bring about leave their records with the test, not with the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_FLIGHT_DIR", str(tmp_path_factory.mktemp("flight")))
        yield


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fails a test whose threads outlive it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5.0
    for thread in _extra(before):
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not _extra(before), f"left behind: {[thread.name for thread in _extra(before)]}"
