"""How ranks meet: by torch's ways, at a coordinator that is there, or by its URL; and the store that it is."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from pytorch.torch_ranks import finish

from paceline._elastic import torchrun_world
from paceline.errors import CoordinatorUnreachable
from paceline.testing import coordinator
from support.processes import Worker, workers

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]

SUM = """
def check(size):
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size == dist.get_world_size()
"""


@pytest.mark.newest
def test_init_process_group_finds_the_backend_without_an_import() -> None:
    code = """
check(2)
assert type(dist.group.WORLD).__module__ == "paceline.torch.backend._process_group" and dist.get_backend() == "paceline"
"""
    finish(2, SUM + code)


def test_ranks_meet_at_an_ipv6_address() -> None:
    finish(2, SUM + "check(2)\n", MASTER_ADDR="::1")


def test_ranks_meet_repeatedly_through_one_file(tmp_path: Path) -> None:
    """By a file that keeps what earlier groups wrote."""
    code = f"""
dist.destroy_process_group()
for _ in range(3):
    dist.init_process_group("paceline", init_method="file://{tmp_path}/store", rank=rank, world_size=world)
    check(2)
    dist.destroy_process_group()
dist.init_process_group("cpu:paceline", init_method="file://{tmp_path}/store", rank=rank, world_size=world)
check(2)
"""
    finish(2, SUM + code)


RESTARTED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("paceline")
x = torch.ones(1)
dist.all_reduce(x)
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
if life == "0" and dist.get_rank() == 1:
    os._exit(3)
os.write(sys.stdout.fileno(), f"life {life} sum {int(x.item())}\\n".encode())  # both ranks share this pipe
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.newest
def test_workers_restarted_by_torchrun_meet_again(tmp_path: Path) -> None:
    """torchrun's store outlives a restart, with the address of a coordinator that has died in it."""
    (tmp_path / "script.py").write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", str(tmp_path / "script.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("life 1 sum 2") == 2, ended.stdout + ended.stderr


class Meeting:
    """Rank 1 as it looks for the coordinator of rank 0, under a clock that its pauses move.

    Args:
        alive_at: when the store has the address of a coordinator that is there.
        before: what it has until then: "dead" refuses connections, the host of "silent" is off.
        environment: of torchrun.

    Attributes:
        keys: that it has asked torch's store for.
        now: seconds.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, alive_at: float, before: str = "dead", **environment: str
    ) -> None:
        for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
        monkeypatch.setattr(torchrun_world, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        monkeypatch.setattr(torchrun_world, "_is_silent", self._is_silent)
        self.keys: list[str] = []
        self.now = 0.0
        self._alive_at, self._before = alive_at, before

    def join(self) -> Any:
        """What `init_process_group` does."""
        store = SimpleNamespace(get=self._get)
        return torchrun_world.join_rank_0(self._place, store, 1, 100.0, 1, contextlib.ExitStack())

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _get(self, key: str) -> bytes:
        self.keys.append(key)
        return b"alive" if self.now >= self._alive_at else self._before.encode()

    def _is_silent(self, address: str) -> bool:
        if address != "silent":
            return False
        self._sleep(1.0)
        return True

    def _place(self, address: str, **_: object) -> str:
        assert address != "silent", "it would be dialled for the whole timeout"
        if address == "dead":
            raise CoordinatorUnreachable("nobody listens at dead")
        return address


def test_a_dead_address_without_an_agent_raises_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(monkeypatch, alive_at=50.0)
    with pytest.raises(CoordinatorUnreachable, match="rank 1 cannot join the coordinator of rank 0"):
        meeting.join()
    assert 1.0 <= meeting.now < 1.3


def test_under_an_agent_rank_1_waits_up_to_the_group_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When a node joins, all start again, and rank 0 may take long to import and to listen."""
    assert Meeting(monkeypatch, alive_at=50.0, RUN_ID="run").join() == "alive"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "rank 1 waits for rank 0 to start a coordinator"
    ]
    meeting = Meeting(monkeypatch, alive_at=1000.0, RUN_ID="run")
    with pytest.raises(CoordinatorUnreachable):
        meeting.join()
    assert 100.0 <= meeting.now < 101.0


@pytest.mark.parametrize("environment", [{}, {"RUN_ID": "run"}], ids=["alone", "agent"])
def test_an_address_on_a_host_that_is_off_is_read_again(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node is lost, and rank 0 starts on another; or it is slow: silence proves nothing, with or without agent."""
    assert Meeting(monkeypatch, alive_at=50.0, before="silent", **environment).join() == "alive"
    (record,) = caplog.records
    assert "silent does not answer: its host is off" in record.getMessage()
    meeting = Meeting(monkeypatch, alive_at=1000.0, before="silent", **environment)
    with pytest.raises(CoordinatorUnreachable, match="silent does not answer"):
        meeting.join()
    assert 100.0 <= meeting.now < 103.0


@contextlib.contextmanager
def silent_address() -> Iterator[str]:
    """Where a connection gets no answer: the kernel has no room for one more that nobody accepts."""
    with socket.socket() as mute, contextlib.ExitStack() as stack:
        mute.bind(("127.0.0.1", 0))
        mute.listen(0)
        for _ in range(4):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(mute.getsockname())
        yield f"127.0.0.1:{mute.getsockname()[1]}"


def test_only_an_unanswered_connection_counts_as_silent() -> None:
    with silent_address() as silent:
        assert torchrun_world._is_silent(silent)
    assert not torchrun_world._is_silent(silent)  # it is refused now
    with coordinator() as address:
        assert not torchrun_world._is_silent(address)


def test_each_restart_reads_another_store_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """So ranks that start again need not find out that the former one is dead."""
    keys = set()
    for count in ("0", "1"):
        meeting = Meeting(monkeypatch, alive_at=0.0, RUN_ID="run", RESTART_COUNT=count)
        meeting.join()
        keys.update(meeting.keys)
    assert len(keys) == 2


@contextlib.contextmanager
def agent_store() -> Iterator[dict[str, str]]:
    """What torchrun's agent tells two workers, but for their ranks; its store is the test's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"RUN_ID": "run", "RESTART_COUNT": "0", "USE_AGENT_STORE": "True"}
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    yield place | {f"TORCHELASTIC_{name}": value for name, value in agent.items()}


LIFE = """
import logging
import torch, torch.distributed as dist

class Tells(logging.Handler):
    def emit(self, record):
        emit("waits", text=record.getMessage())

logging.getLogger("paceline.torch").addHandler(Tells())
torch.set_num_threads(1)
dist.init_process_group("paceline")
x = torch.ones(1)
dist.all_reduce(x)
emit("sum", value=x.item())
wait_for_go()
dist.destroy_process_group()
"""


def test_ranks_restarted_without_a_restart_count_meet_again() -> None:
    """As when a node joins or leaves: the agent's store has the address of the life before, and rank 0 is slow."""
    with contextlib.ExitStack() as stack, agent_store() as place:

        def start(rank: int) -> Worker:
            worker = Worker(LIFE, {"RANK": str(rank), **place})
            stack.callback(worker.close)
            return worker

        first_life = [start(0), start(1)]
        for worker in first_life:
            assert worker.expect("sum", 60.0)["value"] == 2.0
        for worker in first_life:
            worker.signal(signal.SIGKILL)
            worker.wait()
        early = start(1)
        assert "rank 1 waits for rank 0 to start a coordinator" in early.expect("waits", 60.0)["text"]
        for worker in (early, start(0)):
            assert worker.expect("sum", 60.0)["value"] == 2.0
            worker.go()


SHORT = """
import asyncio, logging
from paceline._session.member import MemberConnection

class Tells(logging.Handler):
    def emit(self, record):
        emit("warned", text=record.getMessage())

logging.getLogger("paceline.session").addHandler(Tells())
make_links, barrier = MemberConnection._make_links, paceline.Group.barrier

async def late(connection, view):
    emit("makes links")
    await asyncio.to_thread(wait_for_go)
    await make_links(connection, view)

def told(group, *arguments):
    emit("waits")
    barrier(group, *arguments)

if {shown}:
    if os.environ["RANK"] == "1":
        MemberConnection._make_links = late
    else:
        paceline.Group.barrier = told
with paceline.join() as session:
    emit("joined", rank=session.rank, size=session.size)
    for step in {steps}:
        with step:
            session.group.all_reduce(np.ones(1))
emit("left")
"""
NO_STEPS, TWO_STEPS = "()", 'session.steps(paceline.TrainState(notes={"any": 0}), total=2)'


@contextlib.contextmanager
def under_torchrun(code: str) -> Iterator[list[Worker]]:
    """Two workers of torchrun."""
    with contextlib.ExitStack() as stack, agent_store() as place:
        started = [Worker(code, {"RANK": str(rank), **place}) for rank in range(2)]
        for worker in started:
            stack.callback(worker.close)
        yield started


def test_rank_0_of_a_short_script_waits_until_all_ranks_have_joined() -> None:
    """Its coordinator ends with it: rank 1 would be told so while it still makes its links, out of `join`."""
    with under_torchrun(SHORT.format(shown=True, steps=NO_STEPS)) as (first, second):
        second.expect("makes links", 60.0)
        first.expect("waits")
        second.go()
        for rank, worker in enumerate((first, second)):
            assert worker.expect("joined") | {"at": 0} == {"event": "joined", "at": 0, "rank": rank, "size": 2}
            worker.expect("left")
            assert worker.wait() == 0


def test_reading_rank_before_the_steps_works_under_torchrun() -> None:
    """All start again there when one fails, so nobody is without one."""
    with under_torchrun(SHORT.format(shown=False, steps=TWO_STEPS)) as started:
        for worker in started:
            worker.expect("joined", 60.0)
            worker.expect("left")
            assert worker.wait() == 0


URL = """
import torch, torch.distributed as dist
from datetime import timedelta
import paceline.torch
place = {place}
dist.init_process_group("paceline", init_method="paceline://{address}/url", **place)
check(2)
store = dist.distributed_c10d._get_default_store()
rank = dist.get_rank()
store.set("key", "value") if rank == 0 else None
assert store.get("key") == b"value" and store.add("count", 2) in (2, 4)
dist.barrier()
assert store.add("count", 0) == 4 and store.check(["key", "count"]) and not store.check(["nothing"])
assert store.compare_set("once", "", "first") == b"first"
dist.barrier()
if rank == 0:
    assert store.compare_set("once", "first", "second") == b"second"
    assert store.compare_set("once", "first", "third") == b"second"
    assert store.delete_key("once") and not store.delete_key("once")
    try:
        store.wait(["missing"], timedelta(seconds=0.2))
        raise SystemExit("it waited for nothing")
    except dist.DistStoreError as error:
        assert "missing" in str(error)
whole = []
obj = [{{"from": rank}} if rank == 0 else None]
dist.broadcast_object_list(obj)
assert obj == [{{"from": 0}}]
emit("store", kind=type(dist.distributed_c10d._get_default_store()).__name__)
dist.destroy_process_group()
emit("done")
"""


@pytest.mark.parametrize("given", ["ranks", "world_size", "environment"])
def test_a_coordinator_url_is_also_the_store(given: str) -> None:
    with coordinator() as address:
        started = []
        try:
            for rank in range(2):
                place = {"ranks": {"rank": rank, "world_size": 2}, "world_size": {"world_size": 2}, "environment": {}}
                variables = {"PACELINE_MIN_WORKERS": "2"} if given == "environment" else {}
                started.append(Worker(SUM + URL.format(address=address, place=place[given]), variables))
            for worker in started:
                worker.expect("store", timeout=60)
                worker.expect("done")
                assert worker.wait() == 0
        finally:
            for worker in started:
                worker.close()


def test_ranks_meet_at_the_coordinator_of_the_environment() -> None:
    """As under `paceline run`: torch's own store is the master's, and the members are the coordinator's."""
    with coordinator() as address:
        finish(2, SUM + "check(2)", PACELINE_COORDINATOR=address, PACELINE_JOB="mine")


def test_invalid_urls_raise_value_error() -> None:
    code = """
import torch, torch.distributed as dist
for url in ("paceline://127.0.0.1:1/job?size=3", "paceline://127.0.0.1:1/job?rank=0"):
    try:
        dist.init_process_group("paceline", init_method=url)
    except ValueError as error:
        emit("refused", text=str(error))
"""
    with workers(1, code) as (worker,):
        assert "unknown parameters ['size']" in worker.expect("refused", timeout=60)["text"]
        assert "a rank needs a world_size" in worker.expect("refused")["text"]
