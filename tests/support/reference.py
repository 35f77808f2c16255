"""What the tests of defects that other systems have share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group

__all__ = ["MIB", "X", "Background", "every", "states", "talk_both_ways", "wait_for"]

X = np.ones(4, np.float32)
MIB = 1 << 20


def every(collective: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("schedule", SCHEDULES[collective])


class Background:
    """A call in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.ended = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001  it is raised by `result`
            self._error = error
        finally:
            self.ended = time.monotonic()

    def result(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._value


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def states(group: Group) -> list[tuple[str, str]]:
    return [(entry["operation"], entry["state"]) for entry in group.recorder.snapshot()]


def talk_both_ways(groups: list[Group]) -> None:
    """So that all links are up."""
    other = Background(lambda: (groups[1].barrier(), groups[1].send(X, 0), groups[1].recv(0)))
    groups[0].barrier()
    groups[0].send(X, 1)
    groups[0].recv(1)
    groups[0].hand_over()
    other.result()
