"""How a process group ends: quietly, at once, and in whatever order ranks leave; and what is dead is not waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from pytorch.torch_ranks import torch_ranks

import paceline
from paceline._elastic import torchrun_world
from paceline.errors import CoordinatorUnreachable
from paceline.testing import coordinator
from paceline.torch import backend
from support.ports import free_port
from support.processes import Worker
from support.python_process import fresh

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]

AT_ONCE_S = 20.0
"""Gloo needs no time. What was waited for here took as long as a goodbye that nobody answers, which is longer here."""

LONG_GOODBYES = """
from paceline._session import leaving
leaving.CLOSE_TIMEOUT = leaving._LEAVE_TIMEOUT = 60.0
"""


def complaints(started: Sequence[Worker]) -> list[str]:
    """Returns the lines on standard error; ranks that end in good order write none."""
    return [line for worker in started for line in worker.stderr.splitlines()]


WITHOUT_ONE = """
rest = [other for other in range(world) if other != {leaver}]
if rank == {leaver}:
    {end}
else:
    wait_for_go()
    part = dist.new_group(rest, use_local_synchronization=True)
    t = torch.ones(1)
    dist.all_reduce(t, group=part)
    began = time.monotonic()
    dist.destroy_process_group()
    emit("left", sum=t.item(), took=time.monotonic() - began)
"""


@pytest.mark.newest
@pytest.mark.parametrize(("leaver", "end"), [(0, "dist.destroy_process_group()"), (0, "pass"), (1, "pass")])
def test_other_ranks_continue_after_one_leaves(leaver: int, end: str) -> None:
    """It leaves right after `init_process_group`, and its process ends; rank 0 has the coordinator."""
    with torch_ranks(3, LONG_GOODBYES + WITHOUT_ONE.format(leaver=leaver, end=end)) as started:
        assert started[leaver].wait(60.0) == 0
        rest = [worker for worker in started if worker is not started[leaver]]
        for worker in rest:
            worker.go()
        for worker in rest:
            left = worker.expect("left", 60.0)
            assert left["sum"] == 2
            assert left["took"] < AT_ONCE_S
            assert worker.wait() == 0
    assert not complaints(started)


LATE_LINK = """
import asyncio
from paceline._links import grpc_mesh
from paceline._base.waits import loop_thread

open_link, over = grpc_mesh.dial, threading.Event()

async def open_late(link, *args):
    if link.peer.rank == 2:  # no operation asks for this link
        await asyncio.to_thread(sys.stdin.readline)
        ended = await open_link(link, *args)
        loop_thread().loop.call_soon(over.set)
        return ended
    return await open_link(link, *args)

rank = int(os.environ["RANK"])
if rank == 1:
    grpc_mesh.dial = open_late
else:
    over.set()
import torch, torch.distributed as dist
dist.init_process_group("paceline")
t = torch.full((1,), 7.0 * (rank == 0))
dist.broadcast(t, 0)
assert t.item() == 7
if rank != 2:
    over.wait(60.0)
    part = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(t, group=part)
    emit("sum", sum=t.item())
{end}
"""


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "pass"])
def test_other_ranks_continue_after_one_leaves_before_it_is_linked(end: str) -> None:
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [Worker(LATE_LINK.format(end=end), {"RANK": str(rank), **meeting}) for rank in range(3)]
    try:
        assert started[2].wait(60.0) == 0
        started[1].go()
        for worker in started[:2]:
            assert worker.expect("sum")["sum"] == 14
            assert worker.wait() == 0
    finally:
        for worker in started:
            worker.close()
    assert not complaints(started)


LATE = """
from paceline._session.control import ControlStream

say_goodbye = ControlStream.leave

async def late(stream, cause, timeout):
    emit("leaves")
    await asyncio.to_thread(sys.stdin.readline)
    await say_goodbye(stream, cause, timeout)

if rank == 1:
    ControlStream.leave = late
dist.destroy_process_group()
emit("left")
"""


def test_leaving_after_rank_0_is_quiet() -> None:
    """Rank 1 is held up between its last word to its peers and that to the coordinator, until rank 0 has ended."""
    with torch_ranks(2, "import asyncio\n" + LONG_GOODBYES + LATE) as started:
        started[1].expect("leaves", 60.0)
        assert started[0].wait() == 0
        began = time.monotonic()
        started[1].go()
        started[1].expect("left")
        assert time.monotonic() - began < AT_ONCE_S
        assert started[1].wait() == 0
    assert not complaints(started)


KEPT = """
import torch, torch._dynamo, torch.distributed as dist
dist.init_process_group("paceline")
"""


@pytest.mark.newest
def test_exit_without_destroy_process_group_is_quiet() -> None:
    """torch._dynamo keeps the group until the interpreter is half gone, if it is loaded before all else."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with fresh():
        started = [Worker(KEPT, {"RANK": "0", **meeting})]
    started.append(Worker(KEPT.replace("torch._dynamo, ", ""), {"RANK": "1", **meeting}))
    try:
        assert [worker.wait(150.0) for worker in started] == [0, 0]
    finally:
        for worker in started:
            worker.close()
    assert not complaints(started)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where nobody listens, in place of what rank 0 has written in torch's store."""
    monkeypatch.delenv("PACELINE_COORDINATOR", raising=False)
    monkeypatch.setattr(torchrun_world, "_worlds", 0)
    return f"127.0.0.1:{free_port()}"


def options(store: Any) -> Any:
    """What torch gives for the default group of rank 1 of 2."""
    return SimpleNamespace(
        store=store, group_rank=1, group_size=2, timeout=timedelta(seconds=60), global_ranks_in_group=[], group_id="0"
    )


KEY = "paceline/coordinator/0/1"


def test_a_refused_coordinator_address_raises_at_once(address: str) -> None:
    store = dist.HashStore()
    store.set(KEY, address)
    began = time.monotonic()
    with pytest.raises(
        CoordinatorUnreachable, match=f"(?s)the coordinator of rank 0: .* at {address} is gone.*refused"
    ):
        backend.create(options(store))
    assert time.monotonic() - began < AT_ONCE_S, "it waited for the group's timeout, of 60 s"


def test_a_stale_coordinator_address_is_read_again(address: str) -> None:
    class Store(dist.HashStore):  # type: ignore[misc]
        """Rank 0 writes where its coordinator is, after rank 1 has read what was there."""

        def get(self, key: str) -> bytes:
            found: bytes = super().get(key)
            self.set(key, alive)
            return found

    store = Store()
    store.set(KEY, address)
    with coordinator(for_good=True) as alive, ThreadPoolExecutor(1) as pool, ExitStack() as cleanup:

        def rank_0() -> None:
            with paceline.join(alive, job="torch.1", rank=0, world_size=2) as session:
                session.group.barrier()

        other = pool.submit(rank_0)
        group = backend.create(options(store))
        cleanup.callback(group.shutdown)
        other.result()
