"""A script loads what was trained elsewhere: the job goes on with the step after it, also when workers die or join."""

from __future__ import annotations

import signal

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.slow

WORKER = """
trained = {"total": np.full(1, LOADED * 1000.0)}
state = paceline.TrainState(trained=trained)
state.step = LOADED
steps, committed, asked = [], [], threading.Event()
with paceline.join() as session:
    session.on_commit(committed.append)
    for step in session.steps(state, total=1_000_000):
        with step:
            trained["total"] += session.group.all_reduce(np.ones(1), op="mean")
        if step.applied:
            steps.append(step.number)
            if len(steps) == 1:
                emit("trains", number=step.number)
                threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
        if asked.is_set():
            session.stop()
emit("done", steps=steps, committed=committed, total=trained["total"].item())
"""


def code(loaded: int) -> str:
    return f"LOADED = {loaded}\n{WORKER}"


def test_training_goes_on_from_a_loaded_state_through_a_join_and_a_kill() -> None:
    """One of the first two workers has loaded an older state, and takes that of the other one."""
    with coordinator() as address:
        settings = {"COORDINATOR": address, "MIN_WORKERS": "2", "MAX_WORKERS": "3"}
        with workers(1, code(20), **settings) as (first,), workers(1, code(18), **settings) as (older,):
            assert [worker.expect("trains")["number"] for worker in (first, older)] == [21, 21]
            with workers(1, code(0), **settings) as (newcomer,):
                begun = newcomer.expect("trains")["number"]
                first.signal(signal.SIGKILL)
                newcomer.go()
                older.go()
                ends = [worker.expect("done") for worker in (older, newcomer)]
    last = ends[0]["steps"][-1]
    for end, start in zip(ends, (21, begun), strict=True):
        assert end["steps"] == list(range(start, last + 1))
        assert [number for number in end["committed"] if number > 20] == list(range(start, last + 1))
        assert end["total"] == 20_000 + last - 20
