"""What the coordinator counts of real workers, to the last sample."""

from __future__ import annotations

from paceline.cli.admin import get_job
from paceline.testing import coordinator
from support.processes import workers

TRAIN = """
import os
from paceline import nn

with paceline.join() as session:
    model = nn.Linear(4, 2, rng=np.random.default_rng(os.getpid()))
    optimizer = paceline.optim.SGD(model, lr=0.01)
    ddp = paceline.DDP(model, session.group)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=paceline.ElasticSampler(64, global_batch=10))
    x, t = np.ones((64, 4), np.float32), np.zeros(64, int)
    for step in session.steps(state, total=21):
        with step:
            loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            optimizer.step()
    emit("stats", **session.stats())
"""


def test_totals_of_a_finished_job_equal_the_workers_stats() -> None:
    with coordinator() as address:
        with workers(2, TRAIN, COORDINATOR=address, MIN_WORKERS="2") as started:
            stats = [worker.expect("stats") for worker in started]
            assert [worker.wait() for worker in started] == [0, 0]
        totals = get_job(address, "default", 5.0).totals
    assert [each["steps"] for each in stats] == [21, 21]
    assert sum(each["samples"] for each in stats) == 3 * 64, "three epochs of seven steps"
    assert (totals.committed, totals.undone, totals.step, totals.members_lost) == (21, 0, 21, 0)
    assert totals.samples == 3 * 64, "also of steps since the last heartbeat that was due"
    none, all_ = sorted(each["state_bytes"] for each in stats)
    assert none == 0, "one has what the others start from"
    assert all_ >= (4 + 1) * 2 * 4
    assert all(each["state_seconds"] > 0 for each in stats if each["state_bytes"])
    assert sum(totals.sent_bytes.values()) >= sum(each["sent_bytes"] for each in stats) > 0
