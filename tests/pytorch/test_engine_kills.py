"""A peer dies or freezes while Gloo moves 64 MiB of gradients: all survivors get one error, at once, and train on."""

from __future__ import annotations

import signal
from time import monotonic
from typing import Any

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow, pytest.mark.alone]

PROMPT = 0.1
"""Seconds from the verdict to the error (I7)."""

TRAIN = """
import hashlib
import torch
from paceline._group import wrapper_calls
from paceline._links.fault import Fault

torch.set_num_threads(1)
HOW, WORLD, TOTAL = int(os.environ["HOW"]), int(os.environ["PACELINE_MAX_WORKERS"]), 6
doomed = []
make, settle = wrapper_calls.make_engine, Fault.settle
verdicts = {}

def making(name):
    engine = make(name)
    start = engine.all_reduce
    def starting(x):
        ticket = start(x)
        emit("sum", bytes=x.tensor.nbytes)
        if doomed:
            time.sleep(0.005)  # bytes move
            emit("struck", unfinished=not ticket.done())
            os.kill(os.getpid(), HOW)
        return ticket
    engine.all_reduce = starting
    return engine

def settling(fault, verdict):
    verdicts.setdefault(fault.generation, time.monotonic())
    settle(fault, verdict)

wrapper_calls.make_engine, Fault.settle = making, settling

emit("ready")
wait_for_go()
with paceline.join() as session:
    model = paceline.torch.DDP(torch.nn.Linear(4096, 4096, bias=False), session.group, bucket_mb=100)
    torch.nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = paceline.ElasticSampler(64, global_batch=8)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(state, total=TOTAL):
        with step:
            if (step.number, step.rank, step.world) == (3, 1, WORLD):
                doomed.append(True)
            x = torch.from_numpy(step.indices.astype(np.float32))[:, None] @ torch.ones(1, 4096)
            optimizer.zero_grad()
            try:
                (model(x) / 4096).pow(2).add(model(x)).mean().backward()
            except paceline.PacelineError as error:
                after = time.monotonic() - verdicts[step.generation]
                facts = {"type": type(error).__name__, "ranks": list(error.ranks), "text": str(error)}
                emit("raised", after=after, **facts)
                raise
            optimizer.step()
        emit("applied" if step.applied else "undone", step=step.number, world=step.world, generation=step.generation)
    emit("done", digest=hashlib.sha256(model.module.weight.detach().numpy()).hexdigest())
"""


@pytest.mark.parametrize(
    ("world", "how"),
    [
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param(3, signal.SIGKILL, marks=pytest.mark.exhaustive),
        (4, signal.SIGKILL),
        pytest.param(2, signal.SIGSTOP, marks=pytest.mark.exhaustive),
        (3, signal.SIGSTOP),
        pytest.param(4, signal.SIGSTOP, marks=pytest.mark.exhaustive),
    ],
)
def test_survivors_raise_peer_lost_at_once_and_train_on(world: int, how: signal.Signals, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOW", str(int(how)))
    settings = {"MIN_WORKERS": "1", "MAX_WORKERS": str(world), "ENGINE": "gloo", "FAILURE_TIMEOUT": "2"}
    with coordinator(settle_time=20.0) as address, workers(world, TRAIN, COORDINATOR=address, **settings) as started:
        for worker in started:
            worker.expect("ready", timeout=60.0)
        for worker in started:
            worker.go()
        told: dict[int, list[dict[str, Any]]] = {}
        victim = None
        for number, worker in enumerate(started):
            events: list[dict[str, Any]] = []
            until = monotonic() + 120
            while not events or events[-1]["event"] not in ("done", "struck"):
                events.append(worker.expect_any(max(0.1, until - monotonic())))
            if events[-1]["event"] == "struck":
                victim = number
                assert events[-1]["unfinished"], "the sum was over before the fault"
            else:
                told[number] = events
        assert victim is not None, "nobody was struck"
        assert len(told) == world - 1
        for number in told:
            assert started[number].wait(30.0) == 0, started[number].stderr
    assert all(event["bytes"] == 64 << 20 for events in told.values() for event in events if event["event"] == "sum")
    raised = [event for events in told.values() for event in events if event["event"] == "raised"]
    assert len(raised) == world - 1
    assert {(event["type"], tuple(event["ranks"]), event["text"]) for event in raised} == {
        ("PeerLost", (1,), raised[0]["text"])
    }
    late = [event["after"] for event in raised if event["after"] > PROMPT]
    assert not late, f"errors came {late} s after the verdict"
    for events in told.values():
        steps = [(event["event"], event["step"], event["world"]) for event in events if "step" in event]
        assert steps == [
            *(("applied", step, world) for step in (1, 2)),
            ("undone", 3, world),
            *(("applied", step, world - 1) for step in (3, 4, 5, 6)),
        ]
    assert len({events[-1]["digest"] for events in told.values()}) == 1
