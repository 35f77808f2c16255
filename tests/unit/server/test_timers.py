"""When an operator hears that the coordinator did not run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline_server.timers import Timers


class Loop:
    """A loop whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        self._calls.append((self.now + seconds, call))
        return SimpleNamespace(cancel=lambda: None)

    def pass_time(self, seconds: float) -> None:
        """It does nothing for so long, and then all that is due."""
        self.now += seconds
        due, self._calls = [c for c in self._calls if c[0] <= self.now], [c for c in self._calls if c[0] > self.now]
        for _, call in due:
            call()


@pytest.mark.parametrize(
    ("jobs", "before", "after", "warned"),
    [(1, 0.0, 0.6, True), (0, 0.0, 0.6, False), (1, 0.6, 0.0, False)],
    ids=["stall", "no job", "before the start"],
)
def test_a_stall_after_the_start_is_logged_if_there_are_jobs(
    jobs: int,
    before: float,
    after: float,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)

    class Job:
        timer = None

        class abandonment:
            slept = staticmethod(lambda _s: None)

    some: Any = {str(number): Job() for number in range(jobs)}
    timers = Timers(loop.time(), some, lambda _job, event: told.append(event))
    with caplog.at_level(logging.INFO, "paceline_server"):
        loop.pass_time(before)
        timers.start()
        loop.pass_time(after)
        loop.pass_time(0.05)
        timers.stop()
    assert ("did not run" in caplog.text) == warned
    assert bool(told) == warned


def test_set_starts_no_timer_after_stop() -> None:
    """Otherwise a coordinator that was stopped looks at the clock for ever, in a process that goes on."""

    async def main() -> None:
        job: Any = SimpleNamespace(timer=None)
        timers = Timers(0.0, {"job": job}, lambda _job, _event: None)
        timers.set(job, 1e6)
        assert job.timer is not None
        timers.stop()
        assert job.timer.cancelled()
        timers.set(job, 1e6)
        assert job.timer.cancelled()

    asyncio.run(main())
