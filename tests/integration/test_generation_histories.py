"""The current generation never goes back, for members and commands together, while members and coordinator die."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.process_coordinator import coordinator_process
from support.generations import LEAVES_SOCKETS, TRAINER, Reading, going_back, until_world, watchers
from support.processes import Worker

_ENVIRONMENT = {"PACELINE_MIN_WORKERS": "2", "PACELINE_MAX_WORKERS": "3", "PACELINE_FLIGHT_DIR": "off"}


@LEAVES_SOCKETS
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_observed_generation_never_decreases(tmp_path: Path) -> None:
    views: list[Reading] = []
    with coordinator_process(tmp_path) as coordinator, ExitStack() as stack:
        environment = {**_ENVIRONMENT, "PACELINE_COORDINATOR": coordinator.address}

        def worker() -> Worker:
            started = Worker(TRAINER, environment)
            stack.callback(started.close)
            return started

        stayers = [worker(), worker()]
        with watchers(coordinator.address) as watched:
            for _ in range(2):
                third = worker()
                for each in (*stayers, third):
                    until_world(each, 3, views)
                watched.wait_for(views[-1].generation)
                coordinator.kill()
                third.close()
                coordinator.start()
                for each in stayers:
                    until_world(each, 2, views)
                watched.wait_for(views[-1].generation)
        readings = [*watched.readings, *views]
    assert not going_back(readings)
    assert len({each.generation for each in views}) >= 4
