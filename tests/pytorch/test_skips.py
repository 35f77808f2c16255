"""A step that one rank of torch's training leaves out: alone, it is an error on all; by `step.skip()`, all skip it."""

from __future__ import annotations

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow]

CODE = """
import torch
import paceline.torch

MODE = os.environ["PACELINE_MODE"]
torch.manual_seed(0)
x = torch.randn(96, 4)
with paceline.join() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    wrapped = getattr(paceline.torch, os.environ["PACELINE_KIND"])(model, session.group)
    trained = model if os.environ["PACELINE_KIND"] == "DDP" else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    sampler = paceline.ElasticSampler(96, 12)
    state = paceline.TrainState(model=trained, optimizer=optimizer, sampler=sampler)
    told = []
    try:
        for step in session.steps(state, total=6):
            mine = step.number == 4 and step.rank == 1
            with step:
                optimizer.zero_grad()
                loss = wrapped(x[step.indices]).square().mean()
                if step.number == 4:
                    session.group.barrier()
                if mine and MODE == "skip":
                    step.skip()
                if mine and MODE == "before":
                    continue
                loss.backward()
                if mine and MODE == "after":
                    continue
                optimizer.step()
            told.append((step.number, step.applied, step.skipped))
        emit("done", told=told, samples=session.stats()["samples"], left_out=session.stats()["skipped_samples"])
    except paceline.StepOrderError as error:
        emit("refused", text=str(error), ranks=error.ranks)
"""


@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
@pytest.mark.parametrize("mode", ["skip", "before", "after"])
def test_a_step_left_out_by_one_rank_is_skipped_or_refused_on_all(mode: str, kind: str) -> None:
    with coordinator() as address, workers(2, CODE, COORDINATOR=address, MIN_WORKERS="2", MODE=mode, KIND=kind) as both:
        for worker in both:
            told = worker.expect_any(60.0)
            if mode == "skip":
                assert told["told"][3] == [4, False, True], told
                assert (told["samples"], told["left_out"]) == (30, 6)
            else:
                assert told["event"] == "refused", told
                assert "ended step 4 without optimizer.step() (<string>:" in told["text"]
