"""While nothing goes wrong a step makes no system call beyond those of its gradients: shown by a trace."""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from paceline.testing import coordinator
from support.needs import missing
from support.processes import workers

pytestmark = [pytest.mark.needs(what="root"), pytest.mark.timeout(120)]

WAITS = ("futex", "poll")
"""Waiting for a lock, or for a peer's bytes, is a call or none, as it comes."""

# `getppid` does nothing, and nobody else calls it: it marks where a step begins and ends.
CODE = """
rng = np.random.default_rng(0)
model = paceline.nn.Sequential(*[paceline.nn.Linear(64, 64, rng=rng) for _ in range(3)])
x = np.ones((4, 64), np.float32)
with paceline.join() as session:
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(model, lr=0.01)
    state = paceline.TrainState(model=model, optimizer=optimizer)
    bare = type(optimizer).step
    def one(update):
        y = ddp(x)
        optimizer.zero_grad()
        ddp.backward(y)
        update()
    for step in session.steps(state, total=60):
        if step.number == 10:
            emit("steady")
            wait_for_go()
            os.getppid()
        with step:
            one(optimizer.step)
        if step.number >= 10:
            os.getppid()
            session.group._core.ban_collectives("")  # this is none of the line's
            one(lambda: bare(optimizer))
            os.getppid()
"""


def test_an_elastic_step_makes_no_extra_system_calls(tmp_path: Path) -> None:
    _require_strace()
    trace = tmp_path / "trace"
    with coordinator() as address, workers(2, CODE, COORDINATOR=address, MIN_WORKERS="2") as started:
        for worker in started:
            worker.expect("steady")
        traced = started[0].process.pid
        tracer = subprocess.Popen(
            ["strace", "-f", "-p", str(traced), "-o", trace], stderr=subprocess.PIPE, text=True, process_group=0
        )
        try:
            assert tracer.stderr is not None
            assert "attached" in tracer.stderr.readline()
            for worker in started:
                worker.go()
            assert [worker.wait(60.0) for worker in started] == [0, 0]
            tracer.wait(20.0)
        finally:
            tracer.send_signal(signal.SIGKILL)
            tracer.communicate()
    elastic, plain = _calls_of_steps(trace.read_text(), traced)
    assert len(elastic) >= 45
    names = {name for calls in elastic + plain for name in calls} - set(WAITS)
    more = {name: _median(elastic, name) - _median(plain, name) for name in names}
    assert {name: count for name, count in more.items() if count > 0} == {}
    # How often a thread waits, differs by who comes first: 0 to 12 times, with several peaks, between which a median
    # jumps, in either kind alike. A wait that each step of one kind makes is in the step with the fewest, too.
    for name in WAITS:
        fewest, fewest_plain = (min(calls[name] for calls in steps) for steps in (elastic, plain))
        assert fewest <= fewest_plain + 1, name


def _calls_of_steps(trace: str, thread: int) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """The calls of a thread in each step of either kind, between the marks."""
    kinds: tuple[list[Counter[str]], list[Counter[str]]] = [], []
    calls: Counter[str] | None = None
    marks = 0
    for line in trace.splitlines():
        found = re.match(rf"{thread} +(\w+)\(", line)
        if found is None:
            continue
        if found[1] != "getppid":
            if calls is not None:
                calls[found[1]] += 1
            continue
        if calls is not None:
            kinds[(marks + 1) % 2].append(calls)
        calls, marks = Counter(), marks + 1
    return kinds


def _median(steps: list[Counter[str]], name: str) -> float:
    return statistics.median(calls[name] for calls in steps)


def _require_strace() -> None:
    if shutil.which("strace") is not None and os.geteuid() == 0:
        return
    missing("root", "tracing a process needs root and strace")
