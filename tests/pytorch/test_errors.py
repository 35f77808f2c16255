"""A member dies, freezes or does something else: every survivor's script gets one typed error, soon."""

from __future__ import annotations

import signal

import pytest
from pytorch.torch_ranks import finish, torch_ranks

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]

LONG_SILENCE = {"PACELINE_FAILURE_TIMEOUT": "300"}
"""Whoever noticed a death by silence alone would raise no error while the test waits."""

DIES = """
from torch.nn.parallel import DistributedDataParallel
layers = [torch.nn.Linear(256, 256) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
x = torch.ones(8, 256)

class Die(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient

if {where!r} == "middle":                   # behind two layers, whose gradients are on their way
    layers[1].register_forward_hook(lambda module, args, out: Die.apply(out) if dying else out)
dying = False
model(x).sum().backward()
dist.barrier()
dying = True
out = model(x)
if {where!r} == "start":
    out = Die.apply(out)
emit("backward")
try:
    out.sum().backward()
    emit("silence")
except RuntimeError as error:
    emit("error", ranks=list(error.ranks), lost=isinstance(error, paceline.PeerLost),
         torchs=isinstance(error, dist.DistBackendError), text=str(error))
try:
    dist.all_reduce(torch.ones(1))
except paceline.PeerLost as error:
    emit("again", ranks=list(error.ranks))
"""


@pytest.mark.parametrize("where", ["start", "middle"])
def test_a_death_in_the_backward_pass_of_torch_ddp_raises_peer_lost(where: str) -> None:
    with torch_ranks(3, DIES.format(where=where), **LONG_SILENCE) as started:
        for worker in started:
            worker.expect("backward", 60)
        for worker in (started[0], started[2]):
            told = worker.expect("error")
            assert (told["lost"], told["torchs"], told["ranks"]) == (True, True, [1]), told
            assert worker.expect("again")["ranks"] == [1]


@pytest.mark.newest
def test_works_and_futures_of_a_failed_operation_raise() -> None:
    code = """
t = torch.ones(1000)
dist.all_reduce(t)
emit("ready")
if rank == 1:
    wait_for_go()
works = [dist.all_reduce(t, async_op=True), dist.all_gather_into_tensor(torch.empty(2000), t, async_op=True),
         dist.irecv(torch.empty(1), 1)]
futures = [work.get_future() for work in works]
chained = [future.then(lambda f: f.value()) for future in futures]
emit("issued")
for work, future, after in zip(works, futures, chained):
    found = []
    for what in (work.wait, future.wait, after.wait, future.value, work.result):
        try:
            what()
            found.append("success")
        except RuntimeError as error:
            found.append(str(error))
    assert not work.is_success() and isinstance(work.exception(), paceline.PeerLost), found
    emit("found", found=found)
"""
    with torch_ranks(2, code) as (one, other):
        for worker in (one, other):
            worker.expect("ready", 60)
        one.expect("issued")
        other.signal(signal.SIGKILL)
        for _ in range(3):
            found = one.expect("found")["found"]
            assert all("rank 1" in text and "died" in text for text in found), found


def test_timeouts_name_the_late_rank_and_mismatches_the_operation() -> None:
    code = """
from datetime import timedelta
late = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
if rank == 0:
    try:
        dist.barrier(late)
    except paceline.OperationTimeout as error:
        emit("late", text=str(error), ranks=list(error.ranks))
else:
    wait_for_go()
"""
    with torch_ranks(2, code) as (one, other):
        told = one.expect("late", 60)
        assert told["ranks"] == [1]
        assert "rank 1" in told["text"]
        other.go()
    code = """
try:
    dist.all_reduce(torch.ones(3 + rank))
except paceline.CollectiveMismatch as error:
    emit("mismatch", text=str(error))
"""
    with torch_ranks(2, code) as started:
        for worker in started:
            assert "all_reduce" in worker.expect("mismatch", 60)["text"]


def test_a_receive_that_timed_out_still_gets_its_message() -> None:
    code = """
from datetime import timedelta
if rank == 0:
    got = torch.zeros(1)
    message = dist.irecv(got, 1)
    try:
        message.wait(timedelta(seconds=0.2))
    except paceline.OperationTimeout as error:
        emit("late", text=str(error))
    message.wait()
    emit("came", value=got.item())
else:
    wait_for_go()
    dist.send(torch.ones(1), 0)
"""
    with torch_ranks(2, code) as (one, other):
        assert "a message from rank 1 with tag 0 was not transferred within 0.2 s" in one.expect("late", 60)["text"]
        other.go()
        assert one.expect("came")["value"] == 1.0


def test_monitored_barrier_names_missing_ranks_and_the_group_stays_usable() -> None:
    code = """
from datetime import timedelta
if rank != 2:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    except RuntimeError as error:
        text = str(error)
    assert ("Rank 2 failed" if rank == 0 else "Rank 1 successfully reached") in text, text
dist.all_reduce(torch.ones(1))
"""
    finish(3, code)


def test_forked_loader_workers_do_not_hide_the_death_of_a_rank() -> None:
    """Forked children have neither threads nor links, and take no part; nor do they keep a dead rank alive."""
    code = """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(400.).reshape(100, 4))
loader = DataLoader(data, batch_size=10, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
seen = 0.
for epoch in range(2):
    for (batch,) in loader:
        total = batch.sum()
        dist.all_reduce(total)
        seen += total.item()
assert seen == 2 * world * sum(range(400))
emit("trained")
iterator = iter(loader)
next(iterator)
emit("loading")
try:
    while True:
        dist.all_reduce(torch.ones(10))
except paceline.PeerLost as error:
    emit("lost", ranks=list(error.ranks))
"""
    with torch_ranks(3, code, **LONG_SILENCE) as started:
        for worker in started:
            worker.expect("trained", 90)
        for worker in started:
            worker.expect("loading")
        started[1].signal(signal.SIGKILL)
        for worker in (started[0], started[2]):
            assert worker.expect("lost")["ranks"] == [1]
