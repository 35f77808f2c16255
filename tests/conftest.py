"""What every test gets: a stack dump on a hang (pytest-timeout), and a check that it leaves no thread behind."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from support.every_test import no_leaked_threads, private_flight_records

__all__ = ["no_leaked_threads", "private_flight_records"]

_SLOW_S = 240
"""The time limit of slow tests that name none: six of them may share two cores with a build."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_configure(config: pytest.Config) -> None:
    """A shell's background jobs ignore Ctrl-C, and hand that down to the processes that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_NAMED_IN_FILE = ("alone", "browser", "containers", "peers", "ray", "root", "slow", "slurm")
"""Marks by which `stages.py` chooses files: tests that get one of them elsewhere would not be run."""


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


def _check_marks(items: list[pytest.Item]) -> None:
    found = {
        (item.path, name) for item in items for name in _NAMED_IN_FILE if item.get_closest_marker(name) is not None
    }
    for path, name in sorted(found):
        if f"mark.{name}" not in path.read_text():
            raise pytest.UsageError(f"{path}: its tests have the mark {name!r}: write pytest.mark.{name} in this file")
