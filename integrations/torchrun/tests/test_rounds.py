"""Rounds as torch's agents see them: handlers in threads of one process, at a real coordinator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.utils import store as store_util

from paceline.testing import coordinator
from support.ports import free_port

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(60)]


class Run:
    """The agents of one run; each call of theirs has a thread of its own.

    Args:
        place: address of the coordinator.
        nodes: least and most of them.
        conf: --rdzv-conf.
    """

    def __init__(self, place: str, nodes: tuple[int, int], **conf: Any) -> None:
        self._place, self._nodes = place, nodes
        self._conf = {"join_timeout": "20", "last_call_timeout": "0", **conf}
        self._pool = ThreadPoolExecutor(8)
        self._handlers: list[RendezvousHandler] = []

    def agent(self, name: str = "run") -> RendezvousHandler:
        low, high = self._nodes
        parameters = RendezvousParameters("paceline", self._place, name, low, high, **self._conf)
        self._handlers.append(get_rendezvous_handler(parameters))
        return self._handlers[-1]

    def meet(self, *handlers: RendezvousHandler) -> list[Any]:
        """They meet; what torch is told, by rank."""
        return sorted((each.result(30) for each in self.begin(*handlers)), key=lambda told: told.rank)

    def begin(self, *handlers: RendezvousHandler) -> list[Future[Any]]:
        return [self._pool.submit(handler.next_rendezvous) for handler in handlers]

    def begin_until(self, size: int, handler: RendezvousHandler) -> Future[Any]:
        """The agent meets as torch's does, round after round, until there are so many of them.

        An agent that waits may begin a round alone, before one whose round is over has come back.
        """

        def meet() -> Any:
            while (told := handler.next_rendezvous()).world_size < size:
                until_over(handler)
            return told

        return self._pool.submit(meet)

    def close(self) -> None:
        for handler in self._handlers:
            handler.shutdown()
        self._pool.shutdown()


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    with coordinator() as place, contextlib.ExitStack() as stack:

        def make(*nodes: int, **conf: Any) -> Run:
            made = Run(place, (nodes[0], nodes[-1]), **conf)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers tell workers by the environment."""
    for name in ("PACELINE_COORDINATOR", "PACELINE_JOB"):
        monkeypatch.setenv(name, "")


def until_over(*handlers: RendezvousHandler) -> None:
    """Waits until the agents are told to stop their workers."""
    pause = threading.Event()
    while not all(handler.num_nodes_waiting() for handler in handlers):
        pause.wait(0.01)


def test_a_round_gives_ranks_a_store_and_a_master_address(run: Callable[..., Run]) -> None:
    agents = run(2)
    told = agents.meet(one := agents.agent(), two := agents.agent())
    assert [(each.rank, each.world_size) for each in told] == [(0, 2), (1, 2)]
    places = {(each.bootstrap_store_info.master_addr, each.bootstrap_store_info.master_port) for each in told}
    assert len(places) == 1
    told[0].store.multi_set(["a", "b"], ["1", "2"])
    assert told[1].store.multi_get(["a", "b"]) == [b"1", b"2"]
    assert (one.get_backend(), one.get_run_id(), one.use_agent_store) == ("paceline", "run", False)
    assert (one.num_nodes_waiting(), two.num_nodes_waiting(), one.is_closed()) == (0, 0, False)


def test_exit_barrier_of_torch_works_in_the_store(run: Callable[..., Run]) -> None:
    agents = run(2)
    told = agents.meet(agents.agent(), agents.agent())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: store_util.barrier(each.store, 2, "done", barrier_timeout=20), told))
    with pytest.raises(Exception, match="not set within"):
        store_util.barrier(told[0].store, 2, "alone", barrier_timeout=0.2)


def test_next_round_waits_until_all_agents_have_stopped_their_workers(run: Callable[..., Run]) -> None:
    """One agent has died, so the view is over, and each of the others would be enough for a round."""
    agents = run(1, 3, last_call_timeout="2")
    agents.meet(quick := agents.agent(), slow := agents.agent(), dead := agents.agent())
    dead._round.session.leave(RuntimeError("as if its process had died"))
    until_over(quick, slow)
    (early,) = agents.begin(quick)
    with pytest.raises(TimeoutError):
        early.result(3.0)
    (late,) = agents.begin(slow)
    assert {early.result(20).rank, late.result(20).rank} == {0, 1}


def test_a_newly_waiting_agent_ends_the_round(run: Callable[..., Run]) -> None:
    agents = run(1, 2)
    (alone,) = agents.meet(first := agents.agent())
    assert alone.world_size == 1
    alone.store.set("ranks", "of this round")
    late = agents.begin_until(2, second := agents.agent())
    until_over(first)
    told = agents.begin_until(2, first).result(30)
    assert {told.rank, late.result(20).rank} == {0, 1}
    assert not told.store.check(["ranks"])
    assert not second.num_nodes_waiting()


def test_last_call_admits_agents_before_workers_start(run: Callable[..., Run]) -> None:
    agents = run(1, 2, last_call_timeout="20")
    (first,) = agents.begin(agents.agent())
    with pytest.raises(TimeoutError):
        first.result(1.0)
    (second,) = agents.begin(agents.agent())
    assert {first.result(20).world_size, second.result(20).world_size} == {2}


def test_lost_agent_ends_the_round_and_is_not_waited_for(run: Callable[..., Run]) -> None:
    agents = run(1, 2)
    agents.meet(first := agents.agent(), second := agents.agent())
    second._round.session.leave(RuntimeError("as if its process had died"))
    until_over(first)
    (told,) = agents.meet(first)
    assert told.world_size == 1


def test_agent_that_fails_for_good_closes_the_run_for_the_others(run: Callable[..., Run]) -> None:
    agents = run(2)
    agents.meet(first := agents.agent(), second := agents.agent())
    try:
        raise ValueError("no restart is left")
    except ValueError:
        first.shutdown()
    until_over(second)
    assert second.is_closed()
    (after,) = agents.begin(second)
    with pytest.raises(RendezvousClosedError, match="run 'run' was closed by another node"):
        after.result(20)


def test_agent_whose_workers_are_done_does_not_stop_other_agents(run: Callable[..., Run]) -> None:
    agents = run(2)
    agents.meet(first := agents.agent(), second := agents.agent())
    first.shutdown()
    deaf = threading.Event()
    while not second.is_closed():
        deaf.wait(0.01)
    assert not deaf.wait(0.5)  # the end of the view has come by then
    assert not second.num_nodes_waiting()


def test_agent_waiting_for_a_run_that_closes_does_not_start_it_again(run: Callable[..., Run]) -> None:
    agents = run(1)
    agents.meet(first := agents.agent())
    (late,) = agents.begin(agents.agent())
    with pytest.raises(TimeoutError):
        late.result(1.5)
    first.shutdown()
    with pytest.raises(RendezvousClosedError, match="which this one waited for"):
        late.result(20)


def test_a_later_run_of_the_same_name_starts_afresh(run: Callable[..., Run]) -> None:
    agents = run(1)
    agents.meet(first := agents.agent())
    first.shutdown()
    (told,) = agents.meet(second := agents.agent())
    assert told.world_size == 1
    assert not second.is_closed()


def test_an_unreachable_coordinator_is_skipped() -> None:
    """Of several, the first is dead; a newcomer is noticed all the same."""
    with coordinator() as place, contextlib.closing(Run(f"127.0.0.1:{free_port()},{place}", (1, 2))) as agents:
        agents.meet(first := agents.agent())
        late = agents.begin_until(2, agents.agent())
        until_over(first)
        assert agents.begin_until(2, first).result(30).rank != late.result(20).rank


def test_a_join_timeout_says_how_many_agents_are_missing(run: Callable[..., Run]) -> None:
    agents = run(2, join_timeout="0.5")
    with pytest.raises(RendezvousTimeoutError, match="waiting for 1 more worker"):
        agents.agent().next_rendezvous()


def test_agents_with_other_bounds_are_refused(run: Callable[..., Run]) -> None:
    one, two = run(2), run(3)
    (first,) = one.begin(one.agent())
    with pytest.raises(TimeoutError):
        first.result(1.0)
    with pytest.raises(RendezvousConnectionError, match="min_workers"):
        two.agent().next_rendezvous()
    one.meet(one.agent())


@pytest.mark.parametrize(
    ("endpoint", "name", "conf", "words"),
    [
        ("", "run", {}, "--rdzv-endpoint HOST:7400"),
        ("h:1", "r" * 101, {}, "--rdzv-id can have at most 100 bytes"),
        ("h:1", "run", {"join_timeout": "soon"}, "join_timeout must be a number of seconds from 0, not 'soon'"),
        ("h:1", "run", {"last_call_timeout": "-1"}, "last_call_timeout must be a number of seconds from 0, not '-1'"),
        ("h:x", "run", {}, "not an address of the form host:port"),
    ],
)
def test_invalid_rendezvous_parameters_are_refused(endpoint: str, name: str, conf: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_rendezvous_handler(RendezvousParameters("paceline", endpoint, name, 1, 1, **conf))


def test_coordinator_of_the_environment_is_taken_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_torchrun._terms import read_terms

    parameters = SimpleNamespace(
        endpoint="", run_id="run", min_nodes=1, max_nodes=2, local_addr="h", get=lambda name, default: default
    )
    terms = read_terms(parameters, {"PACELINE_COORDINATOR": "a:7400,b:7400"})
    assert (terms.coordinator, terms.address, terms.join_timeout, terms.last_call) == ("a:7400,b:7400", "h", 600.0, 3.0)
