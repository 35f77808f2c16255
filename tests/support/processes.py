"""Real worker processes that tell a test what happens to them, one JSON line at a time."""

from __future__ import annotations

import json
import queue
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from support.netns import Host
from support.python_process import start_python

__all__ = ["Worker", "workers"]

_PRELUDE = """
import json, os, signal, sys, threading, time
import numpy as np
import paceline

def emit(event, **facts):
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\\n")
    sys.stdout.flush()

def emit_error(error):
    facts = {"ranks": list(getattr(error, "ranks", ())), "operation": getattr(error, "operation", 0)}
    emit("error", type=type(error).__name__, text=str(error), **facts)

def wait_for_go():
    sys.stdin.readline()

"""


class Worker:
    """One process, on a host of the test's network or on this one.

    Its code may call `emit(event, **facts)`, `emit_error(error)` and `wait_for_go()`.
    """

    def __init__(self, code: str, environment: dict[str, str], host: Host | None = None) -> None:
        self.process = start_python(["-c", _PRELUDE + textwrap.dedent(code)], environment, host)
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, event: str, timeout: float = 20.0) -> dict[str, Any]:
        """The next event, which must be this one."""
        found = self.expect_any(timeout, event)
        assert found["event"] == event, f"expected {event!r}, got {found}"
        return found

    def expect_any(self, timeout: float = 20.0, wanted: str = "event") -> dict[str, Any]:
        """The next event, whichever it is."""
        try:
            found = self._events.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"no {wanted!r} within {timeout} s from pid {self.process.pid}") from None
        assert found is not None, f"the worker ended before {wanted!r}:\n{self.stderr}"
        return found

    def go(self) -> None:
        """Releases `wait_for_go`."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> float:
        """Sends a signal; returns the `time.monotonic()` before it."""
        now = time.monotonic()
        self.process.send_signal(number)
        return now

    def wait(self, timeout: float = 20.0) -> int:
        """The exit code; `stderr` is whole then, unless a child of the process has it open still."""
        code = self.process.wait(timeout)
        self._threads[1].join(timeout)
        return code

    @property
    def stderr(self) -> str:
        """What it wrote to standard error so far."""
        return "".join(self._errors)

    def close(self) -> None:
        """Kills it if it still runs, and reads what is left."""
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)


@contextmanager
def workers(count: int, code: str, **environment: str) -> Iterator[list[Worker]]:
    """Starts `count` processes with the same code; environment variables are given without their PACELINE_ prefix."""
    env = {f"PACELINE_{name}": value for name, value in environment.items()}
    started = [Worker(code, env) for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.close()
