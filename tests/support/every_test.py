"""Rules for every test: no thread is left behind, records of failures stay with the test, and slow tests have time."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator

import pytest

from support.needs import NEEDS

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


_SLOW_S = 240
"""The time limit of slow tests that name none: six of them may share two cores with a build."""


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background jobs ignore Ctrl-C, and hand that down to the processes that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage meanwhile, which took a fifth of the time: collected tests stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives slow tests more time before they count as hung, and makes all but one in n of `sampled` ones exhaustive."""
    _check_marks(items)
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SLOW_S))
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            (n,) = sampled.args
            test = item.nodeid.partition("[")[0]
            at, seen[test] = seen[test], seen[test] + 1
            if at % n != at // n % n:  # a diagonal: of a product each value of each argument has its turn
                item.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish() -> None:
    """Keeps what was loaded out of collections of garbage: tests ask for them, and of a full suite each took 0.3 s."""
    gc.collect()
    gc.freeze()


def _check_marks(items: list[pytest.Item]) -> None:
    """Checks that files name the marks by which `stages.py` chooses files: others' tests would not be run."""
    found = set()
    for item in items:
        found |= {(item.path, f"mark.{name}") for name in ("alone", "slow") if item.get_closest_marker(name)}
        for mark in item.iter_markers("needs"):
            if mark.args or mark.kwargs.get("what") not in NEEDS:
                raise pytest.UsageError(f"{item.nodeid}: write needs(what=...), with one of {', '.join(NEEDS)}")
            found.add((item.path, f'needs(what="{mark.kwargs["what"]}")'))
    for path, words in sorted(found):
        if words not in path.read_text():
            raise pytest.UsageError(f"{path}: its tests have {words}, which this file must name itself")
