"""What workers see of `session.store` is linearizable, while connections are cut and the coordinator is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.process_coordinator import coordinator_process
from integration.store_clients import store_clients
from support.histories import UNKNOWN, check, overlapping
from support.relay import relay

_STALE = """
from paceline_server.key_values import KeyValues

begin, get = KeyValues.__init__, KeyValues.get

def begin_and_remember(values, job, settings, budget, keys, *more):
    begin(values, job, settings, budget, keys, *more)
    values.old = dict(keys)

KeyValues.__init__ = begin_and_remember
KeyValues.get = lambda values, key: values.old.get(key) or get(values, key)
"""
"""A coordinator that reads from what was stored when it started."""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_store_histories_are_linearizable(tmp_path: Path) -> None:
    with (
        coordinator_process(tmp_path) as coordinator,
        relay(coordinator.address) as one,
        relay(coordinator.address) as other,
    ):
        with store_clients([coordinator.address, one.address, other.address]) as clients:
            clients.go_on()
            for _ in range(2):
                one.reset_all()
                other.reset_all()
                clients.go_on()
            for _ in range(3):
                coordinator.kill()
                coordinator.start()
                clients.go_on()
            coordinator.kill()
            clients.fail()  # it is away for longer than a call waits
            coordinator.start()
            clients.go_on()
            history = clients.stop()
        assert one.resets + other.resets >= 4
    refusals = check(history)
    assert not refusals, "\n".join(refusals)
    assert len(history) > 1000
    assert sum(call.result is UNKNOWN for call in history) >= 6
    assert overlapping(history) > 300


def test_the_checker_detects_a_stale_read(tmp_path: Path) -> None:
    with coordinator_process(tmp_path, _STALE) as coordinator, store_clients([coordinator.address] * 2) as clients:
        clients.go_on()
        coordinator.kill()
        coordinator.start()
        clients.go_on()
        history = clients.stop()
    refusals = check(history)
    assert any("key 'register'" in text and "get() -> '" in text for text in refusals), refusals
