"""A peer that dies in a backward pass: the error comes out of `loss.backward()`, typed, soon, at every survivor."""

from __future__ import annotations

import signal

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow, pytest.mark.alone]

CODE = """
import torch, paceline.torch
torch.set_num_threads(1)

class Waits(torch.autograd.Function):
    '''In the backward pass of rank 1 in the third step: tells the test, and waits to be killed.'''
    @staticmethod
    def forward(ctx, x, step, rank):
        ctx.dies = step == 3 and rank == 1
        return x.clone()
    @staticmethod
    def backward(ctx, dy):
        if ctx.dies:
            emit("ready")
            time.sleep(60)
        return dy, None, None

wait_for_go()  # torch is loaded: all come at once
with paceline.join() as session:
    emit("joined", rank=session.rank)
    first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    net = torch.nn.ModuleList([first, last])
    model = paceline.torch.DDP(torch.nn.Sequential(first, last), session.group, bucket_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.prepare()
    for step in range(1, 9):
        loss = last(Waits.apply(first(torch.ones(2, 64)), step, session.rank)).square().mean()
        optimizer.zero_grad()
        try:
            {backward}
        except Exception as error:
            emit_error(error)
            emit("left", gradients=sum(p.grad is not None for p in model.parameters()))
            break
        optimizer.step()
"""


@pytest.mark.parametrize("backward", ["loss.backward()", "model.backward(loss, 2.0)"])
def test_a_kill_in_backward_raises_peer_lost_on_survivors(backward: str) -> None:
    # Whoever noticed the death by silence alone would raise no error while the test waits.
    bounds = {"MIN_WORKERS": "3", "MAX_WORKERS": "3", "FAILURE_TIMEOUT": "300"}
    code = CODE.replace("{backward}", backward)
    with coordinator() as address, workers(3, code, COORDINATOR=address, **bounds) as started:
        for worker in started:
            worker.go()
        ranks = {worker.expect("joined")["rank"]: worker for worker in started}
        ranks[1].expect("ready")
        ranks[1].signal(signal.SIGKILL)
        for survivor in (ranks[0], ranks[2]):
            told = survivor.expect("error")
            assert told["type"] == "PeerLost", told
            assert told["ranks"] == [1], told
            assert survivor.expect("left")["gradients"] == 0
