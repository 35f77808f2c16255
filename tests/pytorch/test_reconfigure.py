"""Reconfiguration, torch's interface for fault tolerance: generations of chosen members, deaths, aborts, mistakes.

Members are processes that know nothing of each other but the handles that a test hands out. torch has the interface
from 2.15 on; with an older release, nothing here is collected.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline._base.addresses import Endpoint, Found
from paceline._base.embedded import coordinator
from paceline._base.waits import loop_thread
from paceline.errors import CoordinatorUnreachable, PeerRaised
from paceline.torch.backend import _handles
from paceline.torch.backend._handles import Handle, Presence, PresenceWatcher
from support.processes import Worker
from support.python_process import Process, start_python

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest, pytest.mark.timeout(180)]

SOON_S = 20.0
"""For an error to come; nothing that is not noticed ends before `TIMEOUT_S`. What it takes is measured elsewhere."""

AT_ONCE_S = 1.8
"""For `destroy_process_group`; a goodbye that nobody answers takes 2 s."""

TIMEOUT_S = 60

MEMBER = f"""
import torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from paceline._session.control import ControlStream
torch.set_num_threads(1)
dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True,
                        timeout=timedelta(seconds={TIMEOUT_S}))
group = dist.group.WORLD

class Asking(set):  # those who have asked for this member's name and wait for its end
    came = threading.Semaphore(0)
    def add(self, who):
        super().add(who)
        self.came.release()

group._presence._connections = Asking()

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

def abort_when_told():
    sys.stdin.readline()
    try:
        group.abort()
    except ZeroDivisionError:  # of a hook; the other hook and the group have heard of it
        pass
    emit("aborted")

def abort_from_another_thread(then, **arguments):
    group.register_abort_hook(6, lambda: emit("never"))
    group.unregister_abort_hook(6)
    group.register_abort_hook(7, lambda: 1 // 0)
    group.register_abort_hook(8, lambda: emit("hook"))
    threading.Thread(target=abort_when_told).start()
    return globals()[then](**arguments)

def backend():
    found = dist.get_backend_impl(group, torch.device("cpu"))
    return found is group is dist.get_backend_impl() and found.supports_reconfigure and dist._supports_reconfigure()

def part(ranks):
    one, two, whole = dist.new_group(ranks), dist.new_group(ranks), init_device_mesh("cpu", (dist.get_world_size(),))
    assert dist.get_process_group_ranks(group) == list(range(dist.get_world_size())) == whole.mesh.tolist()
    if dist.get_rank() not in ranks:
        return None
    sums = torch.ones(1), torch.full((1,), 2.0)
    works = [dist.all_reduce(tensor, group=made, async_op=True) for tensor, made in zip(sums, (one, two))]
    for work in works:
        work.wait()
    return [tensor.item() for tensor in sums]

def destroy():
    began = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - began

def wait_until_watched(watchers):
    for _ in range(watchers):
        group._presence._connections.came.acquire()

def say_when_it_registers():
    opened = ControlStream.open
    async def open(stream, timeout):
        emit("registers")
        await opened(stream, timeout)
    ControlStream.open = open

def fork():
    pid = os.fork()
    if not pid:
        signal.pause()
    return pid

def leave_as_it_is():
    sys.exit()

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
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
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
emit("left", took=destroy() if dist.is_initialized() else 0.0)
"""


class Member:
    """A process with a group that can be reconfigured."""

    def __init__(self) -> None:
        self.worker = Worker(MEMBER, {})

    def started(self) -> Member:
        self.handle = self.worker.expect("member", 60.0)["handle"]
        return self

    def tell(self, do: str, /, **arguments: Any) -> None:
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

    def ask(self, do: str, /, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.result()

    def kill(self) -> None:
        self.worker.signal(signal.SIGKILL)
        self.worker.wait()

    @property
    def presence_port(self) -> int:
        """The port at which it says its name."""
        return int(self.handle.split("/")[3])


@contextmanager
def members(count: int) -> Iterator[list[Member]]:
    """Members, which a test may add to. At its end all that live leave: at once, without a word, with exit code 0."""
    all_of_them = [Member() for _ in range(count)]
    try:
        for member in all_of_them:
            member.started()
        yield all_of_them
        alive = [member.worker for member in all_of_them if member.worker.process.poll() is None]
        for worker in alive:
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        assert max(worker.expect("left")["took"] for worker in alive) < AT_ONCE_S
        assert [worker.wait() for worker in alive] == [0] * len(alive)
        for member in all_of_them:
            member.worker.close()
        assert not "".join(member.worker.stderr for member in all_of_them)
    finally:
        for member in all_of_them:
            member.worker.close()


def ask_all(some: Sequence[Member], do: str, timeout: float = 20.0, **arguments: Any) -> list[Any]:
    for member in some:
        member.tell(do, **arguments)
    return [member.result(timeout) for member in some]


def gather(some: Sequence[Member], uuid: int) -> None:
    """Makes a generation of these, in this order."""
    handles = [member.handle for member in some]
    assert ask_all(some, "reconfigure", uuid=uuid, handles=handles) == [[rank, len(some)] for rank in range(len(some))]


def test_ranks_follow_a_list_of_handles_and_agree_for_a_set() -> None:
    with members(3) as (a, b, c):
        gather([c, a, b], 1)
        assert ask_all([a, b, c], "backend") == [True] * 3
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


def test_fifty_generations_with_joins_leaves_and_deaths() -> None:
    with members(3) as everybody:
        line = list(everybody)
        for uuid in range(50):
            if uuid % 10 == 4:  # the first dies, which coordinates: nobody is told but by the next list
                line.pop(0).kill()
            if uuid % 10 == 6:
                everybody.append(Member())
                line.append(everybody[-1].started())
            if uuid % 10 == 8:  # another is first
                line.append(line.pop(0))
            chosen = line[:-1] if uuid % 7 == 3 else line  # one stays out, and is back in the next
            gather(chosen, uuid)
            assert ask_all(chosen, "all_reduce", value=1.0) == [float(len(chosen))] * len(chosen)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_in_an_all_reduce_raises_peer_lost_on_all_survivors(victim: int) -> None:
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


def test_abort_ends_hanging_collectives_on_all_members() -> None:
    with members(3) as (a, b, c):
        gather([a, b, c], 1)
        b.tell("all_reduce_until_it_fails", elements=4)
        a.tell("abort_from_another_thread", then="all_reduce", value=1.0)  # c enters no collective
        b.worker.expect("rolling")
        a.worker.go()
        a.worker.expect("hook")
        heard = {a.worker.expect_any()["event"], a.worker.expect_any()["event"]}
        assert heard == {"error", "aborted"}
        told = b.error()
        assert (told["type"], told["ranks"], told["runtime"]) == ("PeerRaised", [0], True), told
        assert "aborted the process group" in told["text"]
        assert [a.ask("get_error"), b.ask("get_error")] == ["SUCCESS", "REMOTE_ERROR"]
        a.tell("all_reduce", value=1.0)
        assert "was aborted: call torch.distributed._reconfigure()" in a.error()["text"]
        gather([a, b, c], 2)
        assert ask_all([a, b, c], "all_reduce", value=1.0) == [3.0] * 3


@pytest.mark.parametrize("place", [0, 2])
def test_members_regroup_without_a_frozen_member_after_abort(place: int) -> None:
    """Its coordinator, if it is first, says no more than it does."""
    with members(3) as line:
        gather(line, 1)
        frozen = line[place]
        a, b = [member for member in line if member is not frozen]
        frozen.worker.signal(signal.SIGSTOP)
        b.tell("all_reduce_until_it_fails", elements=4)
        a.tell("abort_from_another_thread", then="all_reduce", value=1.0)
        b.worker.expect("rolling")
        a.worker.go()
        a.worker.expect("hook")
        assert {a.worker.expect_any()["event"], a.worker.expect_any()["event"]} == {"error", "aborted"}
        told = b.error()
        assert (told["type"], told["ranks"]) == ("PeerRaised", [line.index(a)]), told
        gather([a, b], 2)
        assert ask_all([a, b], "all_reduce", value=1.0) == [2.0] * 2
        for member in (a, b):  # it is still frozen when they leave
            member.tell("destroy")
        assert max(member.result() for member in (a, b)) < AT_ONCE_S
        frozen.kill()


@contextmanager
def stranger(port: int, word: bytes) -> Iterator[None]:
    """Somebody else who listens there, and says something to each who comes."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            with suppress(OSError):  # shut down
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(word)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_handle_of_a_dead_process_raises_peer_lost_at_once() -> None:
    """A child of it, as a loader of data has them, lives on."""
    with members(3) as (a, b, c), ExitStack() as cleanup:
        gather([a, b, c], 1)
        child = c.ask("fork")
        cleanup.callback(os.kill, child, signal.SIGKILL)
        c.kill()

        def refused(uuid: int, handles: Sequence[str]) -> None:
            for member in (a, b):
                member.tell("reconfigure", uuid=uuid, handles=handles)
            for member in (a, b):
                told = member.error()
                place = handles.index(c.handle)
                assert (told["type"], told["ranks"], told["runtime"]) == ("PeerLost", [place], True), told
                assert c.handle.split("/")[2] in told["text"]

        refused(2, [a.handle, b.handle, c.handle])
        for uuid, word in ((3, b"f" * 16), (4, b"")):
            with stranger(c.presence_port, word):
                refused(uuid, [c.handle, a.handle, b.handle])
        gather([a, b], 5)


@pytest.mark.parametrize("place", [0, 2])
def test_a_death_before_joining_raises_peer_lost_at_once(place: int) -> None:
    with members(3) as line:
        late = line[place]
        rest = [member for member in line if member is not late]
        for member in rest:
            member.tell("reconfigure", uuid=1, handles=[member.handle for member in line])
        late.ask("wait_until_watched", watchers=2)
        late.kill()
        for member in rest:
            told = member.error()
            assert (told["type"], told["ranks"], told["runtime"]) == ("PeerLost", [place], True), told
        gather(rest, 2)


def test_abort_ends_a_reconfiguration_that_waits_for_a_member() -> None:
    with members(2) as (a, b):
        handles = [a.handle, b.handle]
        a.tell("abort_from_another_thread", then="reconfigure", uuid=1, handles=handles)
        b.ask("wait_until_watched", watchers=1)
        a.worker.go()
        a.worker.expect("hook")
        found = {found["event"]: found for found in (a.worker.expect_any(), a.worker.expect_any())}
        assert found["error"]["type"] == "PeerRaised", found
        gather([a, b], 2)


def test_a_frozen_first_member_delays_neither_abort_nor_peer_lost() -> None:
    """It would coordinate, so nobody can register."""
    with members(3) as (first, b, c):
        handles = [first.handle, b.handle, c.handle]
        first.worker.signal(signal.SIGSTOP)
        b.ask("say_when_it_registers")
        b.tell("abort_from_another_thread", then="reconfigure", uuid=1, handles=handles)
        b.worker.expect("registers")
        b.worker.go()
        b.worker.expect("hook")
        found = {found["event"]: found for found in (b.worker.expect_any(), b.worker.expect_any())}
        assert found["error"]["type"] == "PeerRaised", found
        b.tell("reconfigure", uuid=2, handles=handles)
        b.worker.expect("registers")
        c.kill()
        told = b.error()
        assert (told["type"], told["ranks"]) == ("PeerLost", [2]), told
        first.kill()


def test_the_death_of_a_frozen_member_raises_peer_lost() -> None:
    with members(2) as (a, b):
        b.worker.signal(signal.SIGSTOP)
        a.ask("say_when_it_registers")
        a.tell("reconfigure", uuid=1, handles=[a.handle, b.handle])
        a.worker.expect("registers")
        b.kill()
        told = a.error()
        assert (told["type"], told["ranks"]) == ("PeerLost", [1]), told


def test_exit_without_destroying_the_group_is_quiet() -> None:
    with members(3) as (a, b, _):
        gather([a, b], 1)
        for member in (a, b):
            member.tell("leave_as_it_is")
        assert [member.worker.wait() for member in (a, b)] == [0, 0]


def test_reused_uuids_and_invalid_handles_are_refused_without_effect() -> None:
    with members(2) as (a, b):
        gather([a, b], 1)
        handles = [a.handle, b.handle]
        wrong = [
            (1, handles, "StaleGeneration", "already used"),
            (2, [b.handle], "InvalidRank", "must be given once"),
            (2, [a.handle, a.handle], "InvalidRank", "must be given once"),
            (2, [a.handle, "nonsense"], "ValueError", "not a handle of this backend"),
            (2, [a.handle, "paceline://127.0.0.1:99999999/1/0123456789abcdef"], "ValueError", "port"),
            (2, [a.handle, "paceline://127.0.0.1:1/99999999/0123456789abcdef"], "ValueError", "not a handle of this"),
            (2, [a.handle, "paceline://192.0.2.1:1/1/0123456789abcdef"], "LinkUnavailable", "MASTER_ADDR"),
        ]
        for uuid, given, kind, words in wrong:
            a.tell("reconfigure", uuid=uuid, handles=given)
            told = a.error()
            assert told["type"] == kind, told
            assert words in told["text"], told
        assert ask_all([a, b], "all_reduce", value=1.0) == [2.0] * 2
        gather([b, a], 2)


def test_missing_or_disagreeing_members_raise_operation_timeout() -> None:
    with members(3) as (a, b, c):
        a.tell("reconfigure", uuid=1, handles=[a.handle, b.handle], timeout=0.5)
        told = a.error()
        assert (told["type"], told["runtime"]) == ("OperationTimeout", True), told
        port, name = c.handle.split("/")[3:]
        other = f"paceline://127.0.0.1:1/{port}/{name}"  # of a fourth one, which lives
        for member in (a, b):
            member.tell("reconfigure", uuid=2, handles=[a.handle, b.handle, other], timeout=0.5)
        c.tell("reconfigure", uuid=2, handles=[a.handle, b.handle, c.handle], timeout=0.5)
        assert {member.error()["type"] for member in (a, b, c)} == {"OperationTimeout"}
        gather([a, b, c], 3)
        c.worker.signal(signal.SIGSTOP)  # does not say its name, nor, if it is first, coordinate
        for uuid, handles in ((4, [a.handle, c.handle]), (5, [c.handle, a.handle])):
            a.tell("reconfigure", uuid=uuid, handles=handles, timeout=0.5)
            told = a.error()
            assert (told["type"], told["runtime"]) == ("OperationTimeout", True), told
        c.worker.signal(signal.SIGCONT)
        gather([a, b, c], 6)


def test_subgroups_are_created_anew_in_each_generation() -> None:
    with members(3) as line:
        gather(line, 1)
        assert ask_all(line, "part", ranks=[0, 2]) == [[2.0, 4.0], None, [2.0, 4.0]]
        line.append(Member().started())
        line[0].kill()
        rest = line[1:]
        gather(rest, 2)
        assert ask_all(rest, "part", ranks=[1, 2]) == [None, [2.0, 4.0], [2.0, 4.0]]


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_models_are_wrapped_and_trained_anew_in_each_generation(kind: str) -> None:
    """Three members, then two, then one, train to the same weights on the same rows, up to rounding."""
    with members(3) as line:
        found = []
        for uuid in range(3):
            some = line[uuid:]
            gather(some, uuid)
            weights = ask_all(some, "train", timeout=60.0, kind=kind)  # FSDP2 is loaded by each, for seconds
            assert weights == [weights[0]] * len(some)
            found.append(weights[0])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_the_example_trains_on_after_members_are_killed(tmp_path: Path) -> None:
    """Rank 0, which coordinates, within a backward pass; then another after a step that the rest may not have taken."""
    script = (Path(__file__).parents[2] / "examples" / "torch_reconfigure.py").read_text()
    update = "            loss.backward()\n            optimizer.step()\n"
    assert script.count(update) == 1
    assert script.count("wait_for_workers=False)\n") == 1
    script = script.replace("=False)\n", "=False)\nif rank == 0:\n    print(store.port, flush=True)\n")
    script = script.replace(
        update,
        "            if (rank, step) == (0, 60):\n"
        "                next(net.parameters()).register_hook(lambda _: os.kill(os.getpid(), 9))\n"
        f"{update}"
        "            if (rank, step) == (2, 120):\n                os.kill(os.getpid(), 9)\n",
    )
    (tmp_path / "train.py").write_text(script)
    with ExitStack() as cleanup:
        started: list[Process] = []
        port = "0"
        for rank in range(4):
            meeting = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": port}
            process = start_python([str(tmp_path / "train.py")], meeting)
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                cleanup.enter_context(pipe)
            cleanup.callback(process.kill)
            if not started:
                assert process.stdout is not None
                port = process.stdout.readline().strip()
            started.append(process)
        codes = [process.wait(120) for process in started]
        printed = [process.stdout.read() for process in started if process.stdout]
        said = [process.stderr.read() for process in started if process.stderr]
    assert codes == [-9, 0, -9, 0], (printed, said)
    ends = [printed[rank].splitlines()[-1] for rank in (1, 3)]
    assert ends[0] == ends[1]
    assert re.match(r"done: step 300, 2 members, weights \d", ends[0]), ends
    assert re.search(r"step 300: loss 0\.[01]\d+, 2 members", printed[1]), printed
    assert not "".join(said)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_presence_port_answers_at_each_of_its_addresses(host: str) -> None:
    thread = loop_thread()
    presence = Presence()
    thread.run(presence.open(host))
    for asked in {"::": ["127.0.0.1", "::1"]}.get(host, [host]):
        right, wrong = (Handle(Endpoint(asked, 1), presence.port, name) for name in (presence.member, "f" * 16))
        gone: queue.SimpleQueue[int] = queue.SimpleQueue()
        watcher = PresenceWatcher([right, wrong])
        assert 0 not in thread.run(watcher.find_gone())
        thread.run(watcher.watch(gone.put))
        assert gone.get(timeout=SOON_S) == 1
        if asked == host:
            thread.run(presence.close())
            assert gone.get(timeout=SOON_S) == 0
        thread.run(watcher.close())
    thread.run(presence.close())


def test_a_member_with_two_addresses_is_watched_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(host: str) -> Found:
        assert host == "twice"
        return [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0, 0, 0))]

    monkeypatch.setattr(_handles, "look_up", look_up)
    thread = loop_thread()
    presence = Presence()
    thread.run(presence.open("::"))
    watcher = PresenceWatcher([Handle(Endpoint("twice", 1), presence.port, presence.member)])
    assert thread.run(watcher.find_gone()) == []
    assert len(presence._connections) <= 1
    thread.run(watcher.close())
    thread.run(presence.close())


def test_a_member_that_dies_before_identifying_itself_counts_as_gone() -> None:
    thread = loop_thread()
    gone: queue.SimpleQueue[int] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def die() -> None:
            connection, _ = server.accept()
            server.close()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it is reset
            connection.close()

        dying = threading.Thread(target=die)
        dying.start()
        watcher = PresenceWatcher([Handle(Endpoint("127.0.0.1", 1), server.getsockname()[1], "f" * 16)])
        thread.run(watcher.find_gone())
        thread.run(watcher.watch(gone.put))
        assert gone.get(timeout=SOON_S) == 0
        dying.join()
    thread.run(watcher.close())


@pytest.fixture
def alone() -> Iterator[Any]:
    """The group of a process that is its only member."""
    from paceline.torch.backend._reconfigurable import Reconfigurable

    group = Reconfigurable(0, 1, float(TIMEOUT_S), Endpoint("127.0.0.1", 1))
    yield group
    group.shutdown()


def test_a_failed_presence_port_leaks_no_coordinator(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch.backend import _reconfigurable

    running: list[str] = []

    @contextmanager
    def counted(**settings: Any) -> Iterator[str]:
        with coordinator(**settings) as address:
            running.append(address)
            try:
                yield address
            finally:
                running.remove(address)

    async def broken(presence: Presence, host: str) -> None:
        raise OSError("no descriptor is left")

    monkeypatch.setattr(_reconfigurable, "coordinator", counted)
    with monkeypatch.context() as patch:
        patch.setattr(Presence, "open", broken)
        with pytest.raises(OSError, match="no descriptor"):
            alone.get_reconfigure_handle()
    assert running == []
    alone.get_reconfigure_handle()
    assert len(running) == 1


def test_two_threads_close_the_group_once(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`abort` in one, while `reconfigure` leaves them in the other."""
    from paceline.torch.backend import _reconfigurable

    options = _reconfigurable.c10d.ReconfigureOptions()
    options.uuid, options.handles = 1, [alone.get_reconfigure_handle()]
    alone.reconfigure(options)
    end, nowhere, other = _reconfigurable.close_group, alone._empty_group, threading.Thread(target=alone._abort)
    left: list[str] = []

    def counted(*members: Any) -> None:
        left.append("once")
        end(*members)

    def held_up(reason: str) -> Any:
        if other.ident is None:
            other.start()
            other.join(0.2)  # it would be through by then, were there no lock
        return nowhere(reason)

    monkeypatch.setattr(_reconfigurable, "close_group", counted)
    monkeypatch.setattr(alone, "_empty_group", held_up)
    alone._leave_members("over")
    other.join()
    alone.shutdown()
    assert left == ["once"]


def test_an_abort_at_the_end_of_a_reconfiguration_raises_peer_raised(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All links are up, and `reconfigure` has just looked for aborts."""
    from paceline.torch.backend import _reconfigurable

    options = _reconfigurable.c10d.ReconfigureOptions()
    options.uuid, options.handles = 1, [alone.get_reconfigure_handle()]
    look = alone._raise_if_aborted

    def then_abort(aborts: int) -> None:
        look(aborts)
        if alone._group.size:
            alone.abort()

    monkeypatch.setattr(alone, "_raise_if_aborted", then_abort)
    with pytest.raises(PeerRaised):
        alone.reconfigure(options)


def test_an_advertised_port_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members of one generation have it still, while those of the next are met."""
    from paceline.torch.backend import _reconfigurable

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PACELINE_ADVERTISE", f"127.0.0.1:{taken.getsockname()[1]}")
        group = _reconfigurable.Reconfigurable(0, 1, float(TIMEOUT_S), Endpoint("127.0.0.1", 1))
        options = _reconfigurable.c10d.ReconfigureOptions()
        options.uuid, options.handles = 1, [group.get_reconfigure_handle()]
        group.reconfigure(options)
        group.shutdown()


def test_an_unresolvable_host_is_logged_and_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.torch.backend._reconfigurable import Reconfigurable

    async def unknown(host: str, timeout: float) -> Found:
        raise OSError(f"{host} is unknown")

    monkeypatch.setattr("paceline._base.addresses.look_up_within", unknown)
    group = Reconfigurable(0, 1, 0.1, Endpoint("nowhere", 1))
    with pytest.raises(CoordinatorUnreachable, match="nowhere is unknown"):
        group.get_reconfigure_handle()
    assert "nowhere is unknown" in caplog.text
    group.shutdown()


class Elsewhere(dist.TCPStore):  # type: ignore[misc]
    """On a host that has this address; RFC 5737 keeps it for examples."""

    host = "192.0.2.1"


def test_members_meet_at_the_torch_store_unless_its_address_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch.backend._reconfigurable import meeting_point

    near, far = (kind("127.0.0.1", 0, is_master=True, wait_for_workers=False) for kind in (dist.TCPStore, Elsewhere))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert meeting_point(dist.PrefixStore("0/", far)) == Endpoint("192.0.2.1", far.port)
    assert meeting_point(near) == Endpoint("127.0.0.1", near.port)
    assert meeting_point(dist.HashStore()) == Endpoint("127.0.0.1", 1)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.2")
    assert meeting_point(far).host == "192.0.2.1"
    assert [meeting_point(store).host for store in (near, dist.HashStore())] == ["192.0.2.2"] * 2


def test_a_collective_without_members_asks_for_reconfigure() -> None:
    with members(1) as (a,):
        a.tell("all_reduce", value=1.0)
        assert "has no members yet: call torch.distributed._reconfigure()" in a.error()["text"]
        assert a.ask("get_error") == "SUCCESS"
        gather([a], 1)
        assert a.ask("all_reduce", value=3.0) == 3.0
