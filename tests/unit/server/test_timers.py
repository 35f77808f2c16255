"""When an operator hears that the coordinator did not run."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from paceline_server.timers import Timers
from support.coordinator import run


@pytest.mark.parametrize(
    ("jobs", "before", "after", "warned"),
    [(1, 0.0, 0.6, True), (0, 0.0, 0.6, False), (1, 0.6, 0.0, False)],
    ids=["stall", "no job", "before the start"],
)
def test_a_stall_is_told_if_jobs_may_have_suffered(
    jobs: int, before: float, after: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []

    async def main() -> None:
        class Job:
            timer = None

            class abandonment:
                slept = staticmethod(lambda _s: None)

        some: Any = {str(number): Job() for number in range(jobs)}
        timers = Timers(asyncio.get_running_loop().time(), some, lambda _job, event: told.append(event))
        time.sleep(before)  # noqa: ASYNC251  the loop stalls
        timers.start()
        time.sleep(after)  # noqa: ASYNC251
        await asyncio.sleep(0.06)
        timers.stop()

    with caplog.at_level(logging.WARNING, "paceline_server"):
        run(main)
    assert ("did not run" in caplog.text) == warned
    assert bool(told) == warned
