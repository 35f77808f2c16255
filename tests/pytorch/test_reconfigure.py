"""Reconfiguration, torch's interface for fault tolerance: generations of chosen members, deaths, aborts, mistakes.

Members are processes that know nothing of each other but the handles that a test hands out. torch has the interface
from 2.15 on; with an older release, nothing here is collected.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from support.processes import Worker

pytestmark = [pytest.mark.torch, pytest.mark.newest, pytest.mark.timeout(180)]

SOON_S = 5.0
"""For an error to come; nothing that is not noticed ends before `TIMEOUT_S`. What it takes is measured elsewhere."""

TIMEOUT_S = 60

MEMBER = f"""
import torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True,
                        timeout=timedelta(seconds={TIMEOUT_S}))
group = dist.group.WORLD

def reconfigure(uuid, handles, timeout={TIMEOUT_S}, as_set=False):
    chosen = set(handles) if as_set else handles
    dist._reconfigure(uuid, chosen, timeout=timedelta(seconds=timeout)).wait()
    return [dist.get_rank(), dist.get_world_size()]

def all_reduce(value, elements=4):
    tensor = torch.full((elements,), float(value))
    dist.all_reduce(tensor)
    assert (tensor == tensor[0]).all()
    return tensor[0].item()

def all_reduce_until_it_fails(elements):
    tensor = torch.ones(elements)
    while True:
        emit("rolling")
        dist.all_reduce(tensor)

def pass_on():
    rank, size, got = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    sent.wait()
    return got.item()

def abort_from_another_thread():
    group.register_abort_hook(7, lambda: emit("hook"))
    threading.Thread(target=lambda: (sys.stdin.readline(), group.abort())).start()
    return all_reduce(1.0)

def abort():
    group.abort()

def get_error():
    return group.get_error().name

def handle():
    return dist._get_reconfigure_handle()

def train(kind):
    torch.manual_seed(dist.get_rank())  # DDP gives rank 0's weights to all
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(net)
    else:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        mesh = DeviceMesh.from_group(group, "cpu")
        model = fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.arange(12 * 8.0).reshape(12, 8).sin().tensor_split(dist.get_world_size())[dist.get_rank()]
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()

emit("member", handle=handle())
for line in sys.stdin:
    order = json.loads(line)
    try:
        emit("done", result=globals()[order.pop("do")](**order))
    except Exception as error:
        facts = {{"ranks": list(getattr(error, "ranks", ())), "runtime": isinstance(error, RuntimeError)}}
        emit("error", type=type(error).__name__, text=str(error), **facts)
dist.destroy_process_group()
"""


class Member:
    """A process with a group that can be reconfigured."""

    def __init__(self) -> None:
        self.worker = Worker(MEMBER, {})

    def started(self) -> Member:
        self.handle = self.worker.expect("member", 60.0)["handle"]
        return self

    def tell(self, do: str, **arguments: Any) -> None:
        stdin = self.worker.process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        stdin.flush()

    def result(self, timeout: float = 20.0) -> Any:
        found = self.worker.expect_any(timeout)
        assert found["event"] == "done", found
        return found["result"]

    def error(self, timeout: float = SOON_S) -> dict[str, Any]:
        while (found := self.worker.expect_any(timeout))["event"] == "rolling":
            pass
        assert found["event"] == "error", found
        return found

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.result()


@contextmanager
def members(count: int) -> Iterator[list[Member]]:
    """Members, which a test may add to: all are gone at its end."""
    all_of_them = [Member() for _ in range(count)]
    try:
        for member in all_of_them:
            member.started()
        yield all_of_them
    finally:
        for member in all_of_them:
            member.worker.close()


def ask_all(some: Sequence[Member], do: str, **arguments: Any) -> list[Any]:
    for member in some:
        member.tell(do, **arguments)
    return [member.result() for member in some]


def gather(some: Sequence[Member], uuid: int) -> None:
    """Makes a generation of these, in this order."""
    handles = [member.handle for member in some]
    assert ask_all(some, "reconfigure", uuid=uuid, handles=handles) == [[rank, len(some)] for rank in range(len(some))]


def test_a_list_gives_ranks_by_position_and_a_set_one_order_to_all() -> None:
    with members(3) as (a, b, c):
        gather([c, a, b], 1)
        assert [member.ask("handle") for member in (a, b, c)] == [a.handle, b.handle, c.handle]
        assert ask_all([a, b, c], "all_reduce", value=2.0) == [6.0] * 3
        assert ask_all([c, a, b], "pass_on") == [2.0, 0.0, 1.0]
        handles = [a.handle, b.handle, c.handle]
        places = ask_all([a, b, c], "reconfigure", uuid=2, handles=handles, as_set=True)
        assert sorted(places) == [[0, 3], [1, 3], [2, 3]]
        assert ask_all([a, b, c], "all_reduce", value=1.0) == [3.0] * 3


def test_a_group_splits_and_merges() -> None:
    with members(4) as (a, b, c, d):
        gather([a, b, c, d], 1)
        for pair, uuid in (((a, b), 2), ((c, d), 3)):
            for member in pair:
                member.tell("reconfigure", uuid=uuid, handles=[one.handle for one in pair])
        assert [member.result() for member in (a, b, c, d)] == [[0, 2], [1, 2], [0, 2], [1, 2]]
        assert ask_all([a, b, c, d], "all_reduce", value=1.0) == [2.0] * 4
        gather([d, c, b, a], 4)
        assert ask_all([a, b, c, d], "all_reduce", value=1.0) == [4.0] * 4


def test_fifty_generations_with_members_that_come_leave_and_die() -> None:
    with members(3) as everybody:
        line = list(everybody)
        for uuid in range(50):
            if uuid % 10 == 4:  # the first dies, which coordinates: nobody is told but by the next list
                line.pop(0).worker.signal(signal.SIGKILL)
            if uuid % 10 == 6:
                everybody.append(Member())
                line.append(everybody[-1].started())
            if uuid % 10 == 8:  # another is first
                line.append(line.pop(0))
            chosen = line[:-1] if uuid % 7 == 3 else line  # one stays out, and is back in the next
            gather(chosen, uuid)
            assert ask_all(chosen, "all_reduce", value=1.0) == [float(len(chosen))] * len(chosen)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_within_64_mib_is_one_typed_error_for_all_and_the_rest_go_on(victim: int) -> None:
    """Rank 0 has the coordinator: its death is told by the links alone."""
    with members(3) as line:
        gather(line, 1)
        for member in line:
            member.tell("all_reduce_until_it_fails", elements=16 << 20)
        for _ in range(3):
            line[victim].worker.expect("rolling")
        line[victim].worker.signal(signal.SIGKILL)
        rest = [member for member in line if member is not line[victim]]
        for member in rest:
            told = member.error()
            assert (told["type"], told["ranks"], told["runtime"]) == ("PeerLost", [victim], True), told
        assert ask_all(rest, "get_error") == ["COMM_ERROR"] * 2
        gather(rest, 2)
        assert ask_all(rest, "get_error") == ["SUCCESS"] * 2
        assert ask_all(rest, "all_reduce", value=1.0) == [2.0] * 2


def test_abort_ends_what_hangs_here_and_at_the_others() -> None:
    with members(3) as (a, b, c):
        gather([a, b, c], 1)
        b.tell("all_reduce_until_it_fails", elements=4)
        a.tell("abort_from_another_thread")  # c enters no collective
        b.worker.expect("rolling")
        a.worker.go()
        a.worker.expect("hook")
        assert a.error()["runtime"]
        told = b.error()
        assert (told["type"], told["ranks"], told["runtime"]) == ("PeerRaised", [0], True), told
        assert "aborted the process group" in told["text"]
        assert [a.ask("get_error"), b.ask("get_error")] == ["SUCCESS", "REMOTE_ERROR"]
        a.tell("all_reduce", value=1.0)
        assert "was aborted: call torch.distributed._reconfigure()" in a.error()["text"]
        gather([a, b, c], 2)
        assert ask_all([a, b, c], "all_reduce", value=1.0) == [3.0] * 3


def test_the_handle_of_a_dead_process_is_named_at_once() -> None:
    with members(3) as (a, b, c):
        gather([a, b, c], 1)
        c.worker.signal(signal.SIGKILL)
        c.worker.wait()
        for member in (a, b):
            member.tell("reconfigure", uuid=2, handles=[a.handle, b.handle, c.handle])
        for member in (a, b):
            told = member.error()
            assert (told["type"], told["ranks"], told["runtime"]) == ("PeerLost", [2], True), told
            assert c.handle.split("/")[2] in told["text"]
        gather([a, b], 3)


def test_a_uuid_is_used_once_and_mistakes_are_said_before_anything_changes() -> None:
    with members(2) as (a, b):
        gather([a, b], 1)
        handles = [a.handle, b.handle]
        wrong = [
            (1, handles, "StaleGeneration", "already used"),
            (2, [b.handle], "InvalidRank", "must be among the 1 handles once"),
            (2, [a.handle, a.handle], "InvalidRank", "must be among the 2 handles once"),
            (2, [a.handle, "nonsense"], "ValueError", "no handle of this backend"),
            (2, [a.handle, "paceline://127.0.0.1:99999999/ab"], "ValueError", "port"),
        ]
        for uuid, given, kind, words in wrong:
            a.tell("reconfigure", uuid=uuid, handles=given)
            told = a.error()
            assert told["type"] == kind, told
            assert words in told["text"], told
        assert ask_all([a, b], "all_reduce", value=1.0) == [2.0] * 2
        gather([b, a], 2)


def test_a_member_that_does_not_come_is_a_timeout() -> None:
    with members(2) as (a, b):
        a.tell("reconfigure", uuid=1, handles=[a.handle, b.handle], timeout=0.5)
        told = a.error()
        assert (told["type"], told["runtime"]) == ("OperationTimeout", True), told
        gather([a, b], 2)


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_models_are_made_anew_on_each_generation(kind: str) -> None:
    """Three members, then two, then one, train to the same weights on the same rows, up to rounding."""
    with members(3) as line:
        found = []
        for uuid in range(3):
            some = line[uuid:]
            gather(some, uuid)
            weights = ask_all(some, "train", kind=kind)
            assert weights == [weights[0]] * len(some)
            found.append(weights[0])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_a_group_without_members_says_what_to_call() -> None:
    with members(1) as (a,):
        a.tell("all_reduce", value=1.0)
        assert "has no members yet: call torch.distributed._reconfigure()" in a.error()["text"]
        assert a.ask("get_error") == "SUCCESS"
        gather([a], 1)
        assert a.ask("all_reduce", value=3.0) == 3.0
