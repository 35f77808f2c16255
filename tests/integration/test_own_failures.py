"""A worker whose own threads or tasks fail ends with that error, at once; the others are told, and go on without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.testing import coordinator
from support.processes import Worker, workers

TRAIN = """
import asyncio, errno, pathlib
from paceline import nn
from paceline._collectives.engine import Engine
from paceline._links import grpc_mesh
from paceline._links.base import Purpose
from paceline._session.control import ControlStream
from paceline._base.work import Lane

def fail_thread(name):
    start = threading.Thread.start
    def refuse(self):
        if self.name == name:
            emit("planted")
            raise RuntimeError("can't start new thread")
        start(self)
    threading.Thread.start = refuse

def fail_once(owner, name, error, applies=lambda *_: True):
    whole, done = getattr(owner, name), []
    def fail(*arguments, **named):
        if not done and applies(*arguments):
            done.append(1)
            emit("planted")
            raise error
        return whole(*arguments, **named)
    setattr(owner, name, fail)

def on_loop(call):
    session._connection.thread.loop.call_soon_threadsafe(call)

def begin_task(error):
    async def fail():
        raise error
    on_loop(lambda: (emit("planted"), session._connection._start(fail())))

def enter_barrier():
    try:
        session.barrier("alone", timeout=0.1)
    except BaseException as error:
        assert isinstance(error, MemoryError), error

def plant(step):
    {plant}

try:
    with paceline.join() as session:
        rng = np.random.default_rng(session.rank + 1)
        model = nn.Sequential(nn.Linear(4, 16, rng=rng), nn.ReLU(), nn.Linear(16, 2, rng=rng))
        ddp = paceline.DDP(model, session.group)
        optimizer = paceline.optim.SGD(model, lr=0.1)
        x = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
        t = (x.sum(axis=1) > 0).astype(np.int64)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=paceline.ElasticSampler(100, 32))
        emit("joined", rank=session.rank)
        culprit = session.rank == {rank}
        if culprit:
            plant(0)
        directory = os.environ.get("PACELINE_TEST_DIRECTORY")
        for step in session.steps(state, total=6, checkpoint_dir=directory, checkpoint_every=1 if directory else None):
            with step:
                loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
                optimizer.zero_grad()
                if step.number == 3:
                    session.group.barrier()  # all are in this step
                    if culprit:
                        plant(3)
                waits = {waits} and step.number == 3 and step.world == 3 and not culprit
                while waits and not session.group._core.mesh.fault.failed:
                    time.sleep(0.001)  # the news must come without the culprit's next message
                session.group.all_reduce(np.ones(1), async_op=True).wait()
                ddp.backward(dy, step.weight)
                optimizer.step()
            if not step.applied:
                emit("undone", step=step.number, cause=type(step.cause).__name__, text=str(step.cause))
        emit("done", size=session.size)
except BaseException as error:
    emit_error(error)
    raise
"""

THREAD, MEMORY, FILES = "RuntimeError: can't start new thread", "MemoryError: planted", "OSError: [Errno 24] planted"

PLANTS = {
    "no thread for the group": ("fail_thread('paceline-group')", THREAD),
    "no memory in the group's thread": (
        "step == 3 and fail_once(Lane, '_end_turn', MemoryError('planted'), "
        "lambda lane: threading.current_thread() is lane._thread)",
        MEMORY,
    ),
    "no memory in a collective": ("step == 3 and fail_once(Engine, 'run', MemoryError('planted'))", MEMORY),
    "no thread for checkpoints": ("fail_thread('paceline-checkpoint')", THREAD),
    "a task on the loop": ("step == 3 and begin_task(MemoryError('planted'))", MEMORY),
    "a bug in a task on the loop": ("step == 3 and begin_task(KeyError('planted'))", "KeyError: 'planted'"),
    "a callback on the loop": (
        "step == 3 and on_loop(lambda: fail_once(sys, 'intern', MemoryError('planted')) or sys.intern('x'))",
        MEMORY,
    ),
    "the loop itself": (
        "step == 3 and fail_once(session._connection.thread.loop._selector, 'select', MemoryError('planted'))",
        MEMORY,
    ),
    "a heartbeat": (
        "step == 3 and fail_once(session._connection.control, '_progress', MemoryError('planted'))",
        MEMORY,
    ),
    "what is said to the coordinator": (
        "step == 3 and (fail_once(session._connection.control._outgoing, 'put_nowait', MemoryError('planted')))",
        MEMORY,
    ),
    "what the coordinator says": (
        "step == 3 and (fail_once(ControlStream, '_hand_on', MemoryError('planted')), "
        "threading.Thread(target=enter_barrier).start())",
        MEMORY,
    ),
    "a link that is dialled": (
        "step == 3 and (fail_once(grpc_mesh, 'dial', OSError(errno.EMFILE, 'planted')), "
        "session.group._core.mesh.link(0, Purpose.POINT_TO_POINT))",
        FILES,
    ),
}
"""What goes wrong at one rank, and what it ends with. In step 3 the others wait until they are told."""

IN_ITS_TURN = {"no thread for the group", "no memory in the group's thread", "no memory in a collective"}
IN_ITS_TURN |= {"no thread for checkpoints"}
"""These happen where the training thread comes by: the others go on with the step."""

BETWEEN_STEPS = {"no thread for the group", "no thread for checkpoints"}
"""These may happen before the others have begun the next step."""


FAILURE_TIMEOUT = 10.0
"""Seconds, of which a worker whose threads have failed at once takes few."""


def by_rank(started: list[Worker]) -> list[Worker]:
    return sorted(started, key=lambda worker: int(worker.expect("joined")["rank"]))


@pytest.mark.slow
@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.sampled(2)
def test_a_worker_ends_with_its_own_error_and_the_others_continue(what: str, tmp_path: Path) -> None:
    plant, words = PLANTS[what]
    waits, rank = what not in IN_ITS_TURN, 0 if "checkpoints" in what else 2  # the lowest rank of a host writes them
    code = TRAIN.replace("{plant}", plant).replace("{waits}", str(waits)).replace("{rank}", str(rank))
    environment = {"MIN_WORKERS": "2", "MAX_WORKERS": "3", "FAILURE_TIMEOUT": str(FAILURE_TIMEOUT)}
    if "checkpoints" in what:
        environment["TEST_DIRECTORY"] = str(tmp_path)
    with coordinator(settle_time=20.0) as address, workers(3, code, COORDINATOR=address, **environment) as started:
        others = by_rank(started)
        culprit = others.pop(rank)
        planted = culprit.expect("planted")["at"]
        ended = culprit.expect_any()
        if ended["event"] == "undone":  # the step in which it was
            ended = culprit.expect_any()
        assert ended["event"] == "error", ended
        assert f"{ended['type']}: {ended['text']}" == words
        assert ended["at"] - planted < FAILURE_TIMEOUT / 2
        assert culprit.wait() == 1
        assert words in culprit.stderr
        for worker in others:
            *attempts, done = _until(worker, "done")
            assert attempts or what in BETWEEN_STEPS
            for undone in attempts:
                assert undone["cause"] == "PeerRaised"
                assert f"rank {rank}" in undone["text"]
                assert ended["type"] in undone["text"]
                assert ended["text"] in undone["text"]
            assert done["size"] == 2
            assert worker.wait() == 0


def test_training_continues_without_a_worker_that_cannot_make_links() -> None:
    plant = "step == 3 and fail_once(grpc_mesh.GrpcMesh, '__init__', MemoryError('planted'))"
    leave = """if step.number == 4:
                    session.group.barrier()  # all are in this step
                    if session.rank == 3: raise ValueError('enough')
                """
    code = TRAIN.replace("{plant}", plant).replace("{waits}", "False").replace("{rank}", "2")
    code = code.replace("loss, dy =", f"{leave}loss, dy =", 1)
    environment = {"MIN_WORKERS": "2", "MAX_WORKERS": "4", "FAILURE_TIMEOUT": str(FAILURE_TIMEOUT)}
    with coordinator(settle_time=20.0) as address, workers(4, code, COORDINATOR=address, **environment) as started:
        *others, culprit, leaver = by_rank(started)
        assert leaver.expect("error")["type"] == "ValueError"
        assert culprit.expect("undone")["cause"] == "PeerRaised"
        planted = culprit.expect("planted")["at"]
        ended = culprit.expect("error")
        assert (ended["type"], ended["text"]) == ("MemoryError", "planted")
        assert ended["at"] - planted < FAILURE_TIMEOUT / 2
        assert culprit.wait() == 1
        for worker in others:
            *_, last = _until(worker, "done")
            assert last["size"] == 2
            assert worker.wait() == 0


def _until(worker: Worker, kind: str) -> list[dict[str, Any]]:
    """Events up to the first of that kind."""
    events = [worker.expect_any()]
    while events[-1]["event"] != kind:
        events.append(worker.expect_any())
    return events


LIMITED = """
import faulthandler, resource
from paceline import nn

faulthandler.enable()
if os.environ.get("PACELINE_TEST_MORE_MB"):
    (size,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
    limit = 1024 * size + (int(os.environ["PACELINE_TEST_MORE_MB"]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with paceline.join() as session:
    rng = np.random.default_rng(session.rank + 1)
    model = nn.Sequential(nn.Linear(64, 256, rng=rng), nn.ReLU(), nn.Linear(256, 2, rng=rng))
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(model, lr=0.1)
    x = np.random.default_rng(0).normal(size=(100, 64)).astype(np.float32)
    t = (x.sum(axis=1) > 0).astype(np.int64)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=paceline.ElasticSampler(100, 32))
    for step in session.steps(state, total=30):
        with step:
            loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            time.sleep(0.02)
            optimizer.step()
    emit("done", size=session.size)
"""


FULL = re.compile(r"MemoryError|can't start new thread|bad_alloc|[Cc]annot allocate memory|Errno 12|Fatal Python error")

LIMITS = [250, 450, *(pytest.param(mb, marks=pytest.mark.exhaustive) for mb in (350, 400, 500, 550, 600))]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("more_mb", LIMITS)
def test_a_worker_with_too_little_memory_exits_with_a_memory_error(more_mb: int) -> None:
    """An address space that is full somewhere on the way: in `join`, where links are made, or in a step."""
    environment = {"MIN_WORKERS": "2", "MAX_WORKERS": "3"}
    with (
        coordinator() as address,
        workers(2, LIMITED, COORDINATOR=address, **environment) as others,
        workers(1, LIMITED, COORDINATOR=address, TEST_MORE_MB=str(more_mb), **environment) as (limited,),
    ):
        for worker in others:
            worker.expect("done", timeout=20.0)
            assert worker.wait() == 0
        code = limited.wait(timeout=30.0)
    assert code == 0 or FULL.search(limited.stderr), limited.stderr
    if more_mb == LIMITS[0]:
        assert code != 0, "this little is never enough"
