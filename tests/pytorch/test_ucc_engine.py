"""The engine for UCC, on a UCC that is not there: the store, the threads, copies and tickets are real."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from paceline._engines.catalogue import make_engine
from paceline._engines.data_engine import EngineFailed
from paceline._engines.engine_check import ENGINE_RULES, MakeEngines, check_engine, open_engines
from paceline._links.base import Peer
from paceline.config import Config
from paceline.errors import LinkUnavailable
from paceline.testing import local_groups, run_groups
from support.engines import engines_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")

from paceline.torch._ucc_engine import UccEngine
from paceline.torch.ddp import DDP

pytestmark = [pytest.mark.torch, pytest.mark.newest]


class _Team:
    """The ranks that have met: the last one that starts a collective does it for all."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.started: dict[int, dict[int, _FakeWork]] = {}


class _FakeWork:
    """A collective. It ends late by c10d's timeout, and writes its memory once more before."""

    def __init__(self, output: Any, given: Any) -> None:
        self.output, self.given = output, given
        self.over = threading.Event()
        self.why = ""

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        assert self.over.is_set(), "c10d would wait in a loop, and nothing could end it"
        if self.why:
            raise RuntimeError(self.why)


class FakeUcc:
    """Like `ProcessGroupUCC`: it connects in the first collective, in rounds over the store, and cannot abort.

    Attributes:
        limit: seconds after which a collective ends that some rank has not started.
        failures: a collective ends with them.
        held: while it is set, no all-gather is done.
        shared: what TORCH_UCC_SHARED_COMM was when each group was made.
        ended_in: the threads in which groups have ended.
        gathers: the ranks that have started an all-gather.
    """

    limit: ClassVar[float] = 2.0
    failures: ClassVar[list[str]] = []
    held: ClassVar[threading.Event] = threading.Event()
    shared: ClassVar[list[str | None]] = []
    ended_in: ClassVar[list[str]] = []
    gathers: ClassVar[list[int]] = []
    teams: ClassVar[dict[bytes, _Team]] = {}

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        assert timeout >= timedelta(seconds=30), "a frozen rank would end a sum before anybody has given a verdict"
        self.store, self.rank, self.size = store, rank, size
        self.mine: list[_FakeWork] = []
        self.team: _Team | None = None
        self.shared.append(os.environ.get("TORCH_UCC_SHARED_COMM"))

    def _connect(self) -> _Team:
        self.store.deleteKey("group_id0")
        if self.rank:
            self.store.set(f"group_id{self.rank}", b"\0")
        else:
            for rank in range(1, self.size):
                self.store.get(f"group_id{rank}")
                self.store.deleteKey(f"group_id{rank}")
            self.store.set("group_id0", b"\0")
        self.store.get("group_id0")
        names = self._meet(os.urandom(8))
        assert self._meet(names[0]) == [names[0]] * self.size, "two ranks read different contexts"
        return self.teams.setdefault(names[0], _Team())

    def _meet(self, told: bytes) -> list[bytes]:
        """UCC's own all-gather over the store, which uses the same keys in each round."""
        names = [f"0teamr{rank}" for rank in range(self.size)]
        self.store.set(names[self.rank], told)
        while not all(self.store.check([name]) for name in names):
            sleep(0.0005)
        found = [self.store.get(name) for name in names]
        if self.store.add("0ag_done", 1) == self.size:
            for name in ("0ag_done", *names):
                self.store.deleteKey(name)
            for rank in range(self.size):
                self.store.add(f"0ag_free{rank}", 1)
        else:
            self.store.wait([f"0ag_free{self.rank}"])
        self.store.deleteKey(f"0ag_free{self.rank}")
        return found

    def _reduce_scatter_base(self, output: Any, given: Any, options: Any) -> _FakeWork:
        assert options.reduceOp == dist.ReduceOp.SUM
        assert given.numel() == output.numel() * self.size
        return self._start(_FakeWork(output, given), _scatter_sums)

    def _allgather_base(self, output: Any, given: Any) -> _FakeWork:
        assert output.numel() == given.numel() * self.size
        work = self._start(_FakeWork(output, given), _gather)
        self.gathers.append(self.rank)
        return work

    def allreduce(self, tensors: list[Any], options: Any) -> _FakeWork:
        return self._start(_FakeWork(tensors[0], tensors[0].clone()), _sum_in_own_order)

    def _start(self, work: _FakeWork, do: Callable[[list[_FakeWork]], None]) -> _FakeWork:
        self.team = team = self.team or self._connect()
        with team.lock:
            self.mine.append(work)
            of_all = team.started.setdefault(len(self.mine), {})
            of_all[self.rank] = work
            waits = len(of_all) < self.size or any(each.over.is_set() for each in of_all.values())
            if not waits and not (do is _gather and self.held.is_set()):
                works = [of_all[rank] for rank in range(self.size)]
                do(works)
                why = self.failures.pop() if self.failures else ""
                for each in works:
                    each.why = why
                    each.over.set()
        return work

    def __del__(self) -> None:
        """Waits, as UCC does, until collectives are over, and for the other ranks."""
        self.ended_in.append(threading.current_thread().name)
        by = monotonic() + self.limit
        for work in self.mine:
            if not work.over.wait(max(0.0, by - monotonic())):
                work.output.fill_(float("nan"))
                work.over.set()
        try:
            if self.team is not None:
                self._meet(b"")
        except (EngineFailed, RuntimeError):
            pass  # UCC writes it to stderr


def _scatter_sums(works: list[_FakeWork]) -> None:
    for rank, work in enumerate(works):
        size = work.output.numel()
        parts = [each.given[rank * size : (rank + 1) * size] for each in works]
        work.output.copy_(sum([*parts[rank + 1 :], *parts[:rank]], parts[rank].clone()))


def _gather(works: list[_FakeWork]) -> None:
    for work in works:
        work.output.copy_(torch.cat([each.given for each in works]))


def _sum_in_own_order(works: list[_FakeWork]) -> None:
    for rank, work in enumerate(works):
        others = [each.given for each in (*works[rank + 1 :], *works[:rank])]
        work.output.copy_(sum(others, work.given.clone()))


@pytest.fixture(autouse=True)
def ucc(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (FakeUcc.failures, FakeUcc.shared, FakeUcc.ended_in, FakeUcc.gathers, FakeUcc.teams):
        found.clear()  # type: ignore[attr-defined]
    FakeUcc.held.clear()
    monkeypatch.setattr(dist, "ProcessGroupUCC", FakeUcc, raising=False)


@pytest.fixture
def two() -> Iterator[list[Any]]:
    """The open engines of two ranks."""
    with engines_of(UccEngine, 2) as engines:
        open_engines(engines)
        for engine in engines:
            engine._maker.join(10)  # it has then started the thread that sums
        yield engines


@pytest.mark.parametrize("rule", ENGINE_RULES, ids=lambda rule: rule.__name__)
def test_the_engine_keeps_the_rules(rule: Callable[[MakeEngines], None]) -> None:
    check_engine(partial(engines_of, UccEngine), [rule])


def test_ucc_writes_late_into_memory_of_the_engine_only(two: list[Any]) -> None:
    FakeUcc.held.set()
    x = np.ones(1000, np.float32)
    two[1].all_reduce(np.ones(1000, np.float32))
    two[0].all_reduce(x)
    while len(FakeUcc.gathers) < 4:  # two of them connected
        sleep(0.001)
    two[0].abort()
    assert two[0].drained(0.0)
    x[:] = 7
    late = two[0]._summer
    late.join(10)  # it ends once UCC has written for the last time
    assert not late.is_alive()
    assert (x == 7).all()


def test_only_the_engines_own_thread_ends_a_group_which_may_wait_for_ucc(two: list[Any]) -> None:
    two[0].all_reduce(np.ones(1000, np.float32))
    for engine in two:
        engine.abort()
        started = monotonic()
        engine.close(monotonic() + 10)
        assert monotonic() - started < FakeUcc.limit / 2, "close waited for UCC"
    for engine in two:
        engine._summer.join(10)
    gc.collect()
    assert FakeUcc.ended_in == ["paceline-engine-sums"] * 2


def test_generations_share_no_communicator() -> None:
    with engines_of(UccEngine, 2) as engines:
        open_engines(engines)
    assert FakeUcc.shared == ["0", "0"]


def test_an_error_of_ucc_ends_the_engine(two: list[Any]) -> None:
    FakeUcc.failures.append("Connection reset by remote peer")
    tickets = [engine.all_reduce(np.ones(9, np.float32)) for engine in two]
    for engine, ticket in zip(two, tickets, strict=True):
        with pytest.raises(EngineFailed, match="UCC: Connection reset by remote peer"):
            ticket.wait(monotonic() + 10)
        with pytest.raises(EngineFailed):
            engine.all_reduce(np.ones(9, np.float32))


def test_an_abort_ends_the_thread_that_opens_while_a_rank_is_missing() -> None:
    with engines_of(UccEngine, 2) as engines:
        for rank, engine in enumerate(engines):
            engine.open(rank, [Peer(each, str(each), "localhost", "127.0.0.1:1") for each in range(2)], 10.0)
        engines[0].contact(monotonic() + 10)
        opening = engines[0]._maker
        engines[0].abort()
        opening.join(5)
        assert not opening.is_alive()


def test_a_module_trains_with_the_same_bits_at_all_ranks() -> None:
    def train(group: Any) -> bytes:
        torch.manual_seed(0)
        model = DDP(torch.nn.Linear(8, 3), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for n in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(n * 10 + group.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

    bits = run_groups(local_groups(3, Config(engine="ucc")), train)
    assert bits[0] == bits[1] == bits[2]


def test_a_torch_without_ucc_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupUCC")
    with pytest.raises(LinkUnavailable, match=r"'ucc' .* has no ProcessGroupUCC: install torch that is built"):
        make_engine("ucc")
