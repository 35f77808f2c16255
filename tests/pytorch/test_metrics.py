"""The documented way to metrics over all workers, where there is no torch.distributed, runs as it stands."""

from __future__ import annotations

import pytest

from paceline.testing import coordinator
from support.blocks import ROOT, blocks
from support.processes import workers

pytestmark = pytest.mark.needs(what="torch")

PAGE = ROOT / "docs/how-to/torch-training-run.md"
(SNIPPET,) = (block.code for block in blocks(PAGE) if "fragment" in block.flags)

METRIC = """
import torch

class MulticlassAccuracy:
    '''As much of torchmetrics as gathers: sums of all workers, each of which is gathered by a call of its own.'''

    def __init__(self, classes, *, dist_sync_fn, distributed_available_fn):
        self.gather, self.is_distributed = dist_sync_fn, distributed_available_fn
        self.process_group = None

    def reset(self):
        self.sums = {"right": torch.tensor(0), "all": torch.tensor(0)}

    def update(self, scores, targets):
        self.sums["right"] += (scores.argmax(1) == targets).sum()
        self.sums["all"] += len(targets)

    def compute(self):
        sums = self.sums
        if self.is_distributed():
            gathered = {name: self.gather(one, group=self.process_group) for name, one in sums.items()}
            sums = {name: torch.stack(ones).sum(0) for name, ones in gathered.items()}
        return sums["right"] / sums["all"]
"""
"""In place of torchmetrics, which need not be installed; with 1.9.0 the same was tried by hand."""

WORKER = (
    METRIC
    + """
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
x, t = torch.randn(50, 4, generator=generator), torch.randint(0, 3, (50,), generator=generator)
with paceline.join() as session:
    torch.manual_seed(0)
    model = paceline.torch.DDP(torch.nn.Linear(4, 3), session.group)
    for step in session.steps(paceline.TrainState(model=model), total=1):
        with step:
            pass
        FAILS
"""
    + "".join(f"        {line}\n" for line in SNIPPET.splitlines())
    + """
    expected = (model(x).argmax(1) == t).float().mean()
    emit("scored", score=float(score), expected=float(expected), attempts=attempt.number, world=session.size)
"""
)

FAILS = """
        if session.rank == 1:
            gather, calls = session.group.all_gather_object, []
            def failing(o):
                calls.append(1)
                if len(calls) == 2:  # the others have gathered the first sum, and wait for the second
                    from paceline._links.fault import Suspicion
                    from pacelinepb.v1.errors_pb2 import ErrorReason
                    reason = ErrorReason.ERROR_REASON_PEER_RAISED
                    session.group._core.mesh.fault.suspect(Suspicion(reason, None, 1, "failed for a test"))
                return gather(o)
            session.group.all_gather_object = failing
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_metric_is_gathered_over_all_workers(fails: bool) -> None:
    code = "import paceline.torch\n" + WORKER.replace("        FAILS", FAILS if fails else "")
    with coordinator() as address, workers(2, code, COORDINATOR=address, MIN_WORKERS="2", MAX_WORKERS="2") as started:
        told = [worker.expect("scored", timeout=40.0) for worker in started]
    for each in told:
        assert each["score"] == pytest.approx(each["expected"])
        assert (each["attempts"], each["world"]) == (2 if fails else 1, 2)
