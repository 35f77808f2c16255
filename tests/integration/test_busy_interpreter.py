"""A call into C that holds a worker's interpreter for longer than `failure_timeout`: it computes, and is not lost.

Nothing of Python runs in that worker meanwhile, so it sends no heartbeat and answers no call. A stop during such a call
is noticed like any other.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from paceline.testing import coordinator
from support.certificates import make_folder
from support.command import command
from support.processes import Worker, workers

pytestmark = pytest.mark.slow

ENVIRONMENT = {"MIN_WORKERS": "2", "FAILURE_TIMEOUT": "2.0"}

HOLD = """
import ctypes

def hold(seconds):
    ctypes.PyDLL(None).usleep(round(1e6 * seconds))  # PyDLL calls keep the interpreter's lock
"""

WORKER = (
    HOLD
    + """
{before}
with paceline.join() as session:
    group = session.group
    emit("joined", rank=session.rank)
    try:
        group.all_reduce(np.ones(1000))
        if session.rank == 1:
            emit("holding")
            hold({seconds})
        emit("sum", value=float(group.all_reduce(np.ones(1000))[0]))
        session.barrier("end")
    except paceline.PacelineError as error:
        emit_error(error)
"""
)


def by_rank(started: list[Worker]) -> list[Worker]:
    return [worker for _, worker in sorted((worker.expect("joined")["rank"], worker) for worker in started)]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_worker_that_holds_the_gil_is_not_lost(tls: bool, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "certificates")
    secrets = {name.removeprefix("PACELINE_"): path for name, path in folder.environment.items()} if tls else {}
    settings = folder.server() if tls else {}
    code = WORKER.format(before="", seconds=5.0)
    with coordinator(**settings) as address, workers(2, code, COORDINATOR=address, **ENVIRONMENT, **secrets) as started:
        waiting, holding = by_rank(started)
        holding.expect("holding")
        assert waiting.expect("sum")["value"] == 2.0
        assert [worker.wait() for worker in started] == [0, 0], "".join(worker.stderr for worker in started)


def test_a_worker_stopped_while_holding_the_gil_is_lost() -> None:
    code = WORKER.format(before="", seconds=30.0)
    with coordinator() as address, workers(2, code, COORDINATOR=address, **ENVIRONMENT) as started:
        waiting, holding = by_rank(started)
        holding.expect("holding")
        time.sleep(3.5)  # the time that it holds the interpreter, which is what is tested
        stopped = holding.signal(signal.SIGSTOP)
        error = waiting.expect("error")
        assert (error["type"], error["ranks"]) == ("PeerLost", [1])
        assert 0.0 < error["at"] - stopped < 20.0, "the call would last until then"


def test_a_link_opens_after_the_peer_releases_the_gil() -> None:
    """The first caller at a door finds it busy, for longer than a caller waits for a door that does not answer."""
    before = """
import asyncio
from paceline._links.grpc_door import Door
honest, calls = Door._hello, []

async def hello(door, request, context):
    while door._mesh is None:
        await asyncio.sleep(0.001)
    calls.append(request)
    if door._mesh.rank == 1 and len(calls) == 1:
        hold(5.0)
    return await honest(door, request, context)

Door._hello = hello
"""
    code = WORKER.format(before=before, seconds=0.0)
    with coordinator() as address, workers(2, code, COORDINATOR=address, **ENVIRONMENT) as started:
        assert [worker.wait() for worker in started] == [0, 0], "".join(worker.stderr for worker in started)
        for worker in by_rank(started):
            assert worker.expect_any()["event"] in ("holding", "sum")


def test_a_launched_worker_that_holds_the_gil_is_not_lost(tmp_path: Path) -> None:
    code = WORKER.format(before="", seconds=5.0)
    emits = "import numpy as np\nimport paceline\n\ndef emit(event, **facts):\n    print(event, facts)\n"
    script = tmp_path / "script.py"
    script.write_text(emits + code)
    with command("run", "-n", "2", str(script), PACELINE_FAILURE_TIMEOUT="2") as run:
        assert run.wait() == 0, str(run)
    assert run.stdout.count("{'value': 2.0}") == 2
