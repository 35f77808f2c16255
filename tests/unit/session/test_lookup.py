"""Look-ups: what they find, and that a stalled resolver holds up nobody but those who ask for that name."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.session import lookup
from paceline.session.lookup import look_up, look_up_all


class Stall:
    """A resolver that answers when it is told to: 10.0.0.1 for each name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.release = threading.Event()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, *arguments: Any, **options: Any) -> Any:
        if options.get("flags") == socket.AI_NUMERICHOST:
            return self._real(host, *arguments, **options)
        self.asked.append(host)
        assert self.release.wait(20)
        return self._real("10.0.0.1", None, type=socket.SOCK_STREAM)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    made = Stall(monkeypatch)
    yield made
    made.release.set()
    for thread in threading.enumerate():
        if thread.name == "paceline-lookup":
            thread.join(20)


def test_names_and_literals() -> None:
    found = asyncio.run(look_up_all(["127.0.0.1", "::1", "localhost", "no-such-host.invalid", "a..b", "x" * 64]))
    assert found["127.0.0.1"] == {"127.0.0.1"}
    assert found["::1"] == {"::1"}
    assert found["localhost"] & {"127.0.0.1", "::1"}
    assert [found[name] for name in ("no-such-host.invalid", "a..b", "x" * 64)] == [set()] * 3


def test_an_unknown_name_raises() -> None:
    for name in ("no-such-host.invalid", "a..b", "a\0b"):
        with pytest.raises(socket.gaierror):
            asyncio.run(look_up(name))


def test_who_asks_for_the_same_name_shares_the_answer(stall: Stall) -> None:
    async def ask() -> None:
        impatient, *others = (asyncio.ensure_future(look_up("node")) for _ in range(5))
        await asyncio.sleep(0)
        impatient.cancel()  # this one gives up, and takes the answer from nobody
        await asyncio.sleep(0)
        assert impatient.cancelled()
        stall.release.set()
        for found in await asyncio.gather(*others):
            assert [target[0] for _, target in found] == ["10.0.0.1"]

    asyncio.run(ask())
    assert stall.asked == ["node"]


def test_stalled_names_hold_up_neither_others_nor_the_pool_nor_the_end(stall: Stall) -> None:
    async def ask() -> None:
        waiting = [asyncio.ensure_future(look_up(f"dead-{n}")) for n in range(100)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(int, "7"), 10) == 7
        assert await asyncio.wait_for(look_up("10.0.0.2"), 10)
        assert not any(future.done() for future in waiting)
        assert len(lookup._under_way) == 100

    with ThreadPoolExecutor(1) as pool:  # the loop's end does not wait for the resolver
        pool.submit(asyncio.run, ask()).result(20)


def test_of_a_list_not_all_are_looked_up_at_once(stall: Stall) -> None:
    async def ask() -> dict[str, set[str]]:
        asking = asyncio.ensure_future(look_up_all(f"node-{n}" for n in range(100)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert 0 < len(lookup._under_way) <= 32
        stall.release.set()
        return await asking

    assert set(map(frozenset, asyncio.run(ask()).values())) == {frozenset({"10.0.0.1"})}
