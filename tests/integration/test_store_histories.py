"""What workers see of `session.store` is linearizable, while connections are cut and the coordinator is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.histories import UNKNOWN, check, overlapping
from support.ports import free_port
from support.python_process import Process, start_python
from support.relay import relay
from support.store_clients import store_clients

_SERVE = """
import sys
PLANT
from paceline_server.__main__ import main
sys.exit(main())
"""

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


class Server:
    """A coordinator with a state file, which is killed and started again.

    Args:
        folder: for its state and its log.
        plant: code that breaks it.
    """

    def __init__(self, folder: Path, plant: str = "") -> None:
        self.address = f"127.0.0.1:{free_port()}"
        code = _SERVE.replace("PLANT", plant)
        self._command = ["-c", code, "--listen", self.address, "--state", str(folder / "state.db")]
        self._log = (folder / "coordinator.log").open("wb")
        self._process: Process = start_python(self._command, {}, stderr=self._log.fileno())

    def start(self) -> None:
        self._process = start_python(self._command, {}, stderr=self._log.fileno())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def close(self) -> None:
        self.kill()
        self._log.close()


@contextmanager
def server(folder: Path, plant: str = "") -> Iterator[Server]:
    started = Server(folder, plant)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_histories_are_linearizable(tmp_path: Path) -> None:
    with server(tmp_path) as coordinator, relay(coordinator.address) as one, relay(coordinator.address) as other:
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


def test_a_stale_read_is_noticed(tmp_path: Path) -> None:
    with server(tmp_path, _STALE) as coordinator, store_clients([coordinator.address] * 2) as clients:
        clients.go_on()
        coordinator.kill()
        coordinator.start()
        clients.go_on()
        history = clients.stop()
    refusals = check(history)
    assert any("key 'register'" in text and "get() -> '" in text for text in refusals), refusals
