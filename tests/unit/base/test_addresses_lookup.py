"""Look-ups: what they find, and that a stalled resolver holds up nobody but those who ask for that name.

Nor those, if it was only the question that was lost.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline._base.addresses import _THREADS, Lookups, look_up, look_up_all, look_up_within


class Stall:
    """A resolver that answers when it is told to: 10.0.0.1 for each name.

    Attributes:
        asked: the names, in the order in which they came.
        release: all questions are answered.
        lost: so many are not, the first ones: whoever asked gives up when `late` says so.
        loser: the last of them.
        lookups: those of this test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.lost = 0
        self.loser = threading.current_thread()
        self._another = threading.Condition()
        self.release, self.late = threading.Event(), threading.Event()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)
        self.lookups = Lookups(silence_s=0.0)

    def __call__(self, host: str, *arguments: Any, **options: Any) -> Any:
        if options.get("flags") == socket.AI_NUMERICHOST:
            return self._real(host, *arguments, **options)
        with self._another:
            self.asked.append(host)
            if lost := len(self.asked) <= self.lost:
                self.loser = threading.current_thread()
            self._another.notify_all()
        if lost:
            assert self.late.wait(20)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        assert self.release.wait(20)
        return self._real("10.0.0.1", None, type=socket.SOCK_STREAM)

    async def wait_for(self, host: str, count: int) -> None:
        """Returns when the name was asked for so many times."""

        def wait() -> bool:
            with self._another:
                return self._another.wait_for(lambda: self.asked.count(host) >= count, 20)

        assert await asyncio.to_thread(wait)


@pytest.fixture
def soon(stall: Stall) -> None:
    """Questions are put again at once."""
    stall.lookups = Lookups(again_s=0.01, silence_s=0.0)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    made = Stall(monkeypatch)
    yield made
    made.release.set()
    made.late.set()
    for thread in threading.enumerate():
        if thread.name == "paceline-lookup":
            thread.join(20)


def test_look_up_all_resolves_names_and_literals() -> None:
    found = asyncio.run(look_up_all(["127.0.0.1", "::1", "localhost", "no-such-host.invalid", "a..b", "x" * 64]))
    assert found["127.0.0.1"] == {"127.0.0.1"}
    assert found["::1"] == {"::1"}
    assert found["localhost"] & {"127.0.0.1", "::1"}
    assert [found[name] for name in ("no-such-host.invalid", "a..b", "x" * 64)] == [set()] * 3


def test_an_unknown_name_raises() -> None:
    for name in ("no-such-host.invalid", "a..b", "a\0b"):
        with pytest.raises(socket.gaierror):
            asyncio.run(look_up(name))


def test_concurrent_lookups_of_one_name_share_one_query(stall: Stall) -> None:
    async def ask() -> None:
        impatient, *others = (asyncio.ensure_future(look_up("node", lookups=stall.lookups)) for _ in range(5))
        await asyncio.sleep(0)
        impatient.cancel()  # this one gives up, and takes the answer from nobody
        await asyncio.sleep(0)
        assert impatient.cancelled()
        stall.release.set()
        for found in await asyncio.gather(*others):
            assert [target[0] for _, target in found] == ["10.0.0.1"]

    asyncio.run(ask())
    assert stall.asked == ["node"]


@pytest.mark.usefixtures("soon")
def test_a_lost_query_is_repeated(stall: Stall) -> None:
    stall.lost = 1
    stall.release.set()
    found = asyncio.run(look_up("node", lookups=stall.lookups))
    assert [target[0] for _, target in found] == ["10.0.0.1"]
    assert len(stall.asked) >= 2
    assert not stall.lookups.under_way


@pytest.mark.usefixtures("soon")
def test_a_query_that_times_out_does_not_fail_the_other_queries(stall: Stall) -> None:
    stall.lost = 1

    async def ask() -> None:
        asking = asyncio.ensure_future(look_up("node", lookups=stall.lookups))
        await stall.wait_for("node", 2)
        stall.late.set()
        await asyncio.to_thread(stall.loser.join, 20)
        assert not stall.lookups.under_way["node"].answer.done()
        stall.release.set()
        assert await asking

    asyncio.run(ask())


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("lost", "silence_s"),
    [pytest.param(100, 0.0, id="when all have given up"), pytest.param(1, 60.0, id="when a name server says so")],
)
def test_a_lookup_fails_when_all_queries_or_a_name_server_fail(lost: int, silence_s: float, stall: Stall) -> None:
    """Silence of one counts for nothing while another still asks; a word of a name server, which comes sooner, does."""
    stall.lookups = Lookups(again_s=0.01, silence_s=silence_s)
    stall.lost = lost

    async def ask() -> None:
        asking = asyncio.ensure_future(look_up("node", lookups=stall.lookups))
        await stall.wait_for("node", 2)
        stall.late.set()
        with pytest.raises(socket.gaierror, match="Temporary failure"):
            await asking

    asyncio.run(ask())
    assert not stall.lookups.under_way


@pytest.mark.usefixtures("soon")
def test_lookup_threads_per_name_are_limited(stall: Stall) -> None:
    async def ask() -> None:
        patient = asyncio.ensure_future(look_up_all(["a list's"], lookups=stall.lookups))
        asking = asyncio.ensure_future(look_up("node", lookups=stall.lookups))
        await stall.wait_for("node", _THREADS)
        question = stall.lookups.under_way["node"]
        question._asked_at = float("-inf")
        with stall.lookups.lock:
            question.ask()
        assert (question._threads, stall.asked.count("a list's")) == (_THREADS, 1)
        stall.release.set()
        await asyncio.gather(patient, asking)

    asyncio.run(ask())
    assert stall.asked.count("node") == _THREADS


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("others", [0, 1])
def test_failure_to_start_a_thread_raises_unless_a_query_is_running(
    others: int, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left, refused = threading.Thread.start, [others], threading.Event()

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "paceline-lookup":
            left[0] -= 1
            if left[0] < 0:
                refused.set()
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)

    async def ask() -> None:
        asking = asyncio.ensure_future(look_up("node", lookups=stall.lookups))
        if others:
            assert await asyncio.to_thread(refused.wait, 20)
            stall.release.set()
            assert await asking
        else:
            with pytest.raises(OSError, match="cannot start a thread"):
                await asking

    asyncio.run(ask())
    assert not stall.lookups.under_way


def test_look_up_within_raises_at_the_timeout(stall: Stall) -> None:
    with pytest.raises(OSError, match="the name 'node' does not resolve: the resolver does not answer"):
        asyncio.run(look_up_within("node", 0.05, lookups=stall.lookups))
    stall.release.set()
    assert asyncio.run(look_up_within("node", 20.0, lookups=stall.lookups))


def test_stalled_lookups_block_no_other_lookup_nor_the_loop_s_end(stall: Stall) -> None:
    async def ask() -> None:
        waiting = [asyncio.ensure_future(look_up(f"dead-{n}", lookups=stall.lookups)) for n in range(100)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(int, "7"), 10) == 7
        assert await asyncio.wait_for(look_up("10.0.0.2", lookups=stall.lookups), 10)
        assert not any(future.done() for future in waiting)
        assert len(stall.lookups.under_way) == 100

    with ThreadPoolExecutor(1) as pool:  # the loop's end does not wait for the resolver
        pool.submit(asyncio.run, ask()).result(20)


def test_look_up_all_limits_concurrent_lookups(stall: Stall) -> None:
    async def ask() -> dict[str, set[str]]:
        asking = asyncio.ensure_future(look_up_all((f"node-{n}" for n in range(100)), lookups=stall.lookups))
        for _ in range(10):
            await asyncio.sleep(0)
        assert 0 < len(stall.lookups.under_way) <= 32
        stall.release.set()
        return await asking

    assert set(map(frozenset, asyncio.run(ask()).values())) == {frozenset({"10.0.0.1"})}
