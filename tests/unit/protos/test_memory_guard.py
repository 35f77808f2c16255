"""When the guard looks at connections, and whom it takes for a member."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from pacelinepb.grpc_metadata import MOST_BYTES, TooMuchMetadata, bound_metadata
from pacelinepb.memory_guard import GROWTH_BYTES, Callers, Looks

PEER, PLACE = "ipv4:10.0.0.5:4711", ("10.0.0.5", 4711)


def test_a_look_is_due_after_growth_since_the_minimum_or_the_last_look() -> None:
    looks = Looks()
    assert not looks.is_due(1 << 30, 0.0)
    assert not looks.is_due(0, 0.1)
    assert not looks.is_due(GROWTH_BYTES, 0.2)
    assert looks.is_due(GROWTH_BYTES + 1, 0.3)
    looks.looked(GROWTH_BYTES + 1, 0, 0.0, 0.3)
    assert not looks.is_due(2 * GROWTH_BYTES + 1, 0.4)
    assert looks.is_due(2 * GROWTH_BYTES + 2, 0.5)


def test_looks_without_cuts_take_at_most_a_fiftieth_of_the_time() -> None:
    looks = Looks()
    looks.is_due(0, 0.0)
    looks.looked(0, 0, 0.004, 0.0)
    assert not looks.is_due(1 << 40, 0.19)
    assert looks.is_due(1 << 40, 0.21)
    assert looks.wait == 0.05


def test_looks_are_more_frequent_for_5_s_after_a_cut() -> None:
    looks = Looks()
    looks.is_due(0, 0.0)
    looks.looked(0, 1, 0.0001, 0.0)
    assert looks.wait < 0.05
    assert looks.is_due(0, 4.9)
    looks.looked(0, 0, 0.1, 4.9)
    assert looks.wait == 1.0, "a tenth of its time"
    assert not looks.is_due(0, 5.1)
    assert looks.wait == 0.05
    assert not looks.is_alert(5.1)


def test_a_caller_stays_known_while_its_last_call_is_ending() -> None:
    """The guard's thread may look at any of them."""

    class Watched(dict[Any, float]):
        def __setitem__(self, place: Any, now: float) -> None:
            assert callers.has(place, now)
            super().__setitem__(place, now)
            assert callers.has(place, now)

    callers = Callers(1.0)
    callers._ended = Watched()
    callers.came(PEER)
    callers.went(PEER, 5.0)
    assert callers._ended == {PLACE: 5.0}


def test_a_caller_is_known_during_calls_and_until_its_connection_closes() -> None:
    callers = Callers(1.0)
    assert not callers.has(PLACE, 0.0)
    callers.came(PEER)
    callers.came(PEER)
    callers.went(PEER, 5.0)
    assert callers.calls(PLACE)
    assert callers.has(PLACE, 100.0)
    callers.went(PEER, 100.0)
    assert not callers.calls(PLACE)
    assert callers.has(PLACE, 101.9)
    assert not callers.has(PLACE, 102.1), "another caller may have its port now"


def test_a_returning_caller_is_known_for_the_full_time_again() -> None:
    callers = Callers(1.0)
    for now in (0.0, 1.5):
        callers.came(PEER)
        callers.went(PEER, now)
    assert callers.has(PLACE, 3.4)


def test_callers_are_forgotten_once_they_are_gone() -> None:
    callers = Callers(1.0)
    for number in range(1_000):
        callers.came(f"ipv4:10.0.0.5:{number}")
        callers.went(f"ipv4:10.0.0.5:{number}", float(number))
    assert len(callers._ended) == 3
    assert not callers._calls


@pytest.mark.parametrize(
    ("peer", "place"),
    [
        ("ipv4:10.0.0.5:4711", ("10.0.0.5", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", ("fe80::1", 4711)),
    ],
)
def test_grpc_peer_strings_are_parsed(peer: str, place: tuple[str, int]) -> None:
    callers = Callers(1.0)
    callers.came(peer)
    assert callers.calls(place)


class Extension:
    """Stands in for grpc's extension module, whose function `bound_metadata` replaces, and for a call it serves."""

    def __init__(self) -> None:
        self.fields = 0

    def _Metadatum(self, key: str, value: str) -> tuple[str, str]:
        self.fields += 1
        return key, value

    async def _handle_rpc(self, fields: int) -> Any:
        if fields < 0:
            raise UnicodeError
        return await self._find_method_handler([self._Metadatum("key", "value") for _ in range(fields)])

    async def _find_method_handler(self, metadata: list[tuple[str, str]]) -> Any:
        await asyncio.sleep(0)
        return [self._Metadatum(key, value) for key, value in metadata * 100]


FIELD = 32 + len("key" + "value")


def test_metadata_fields_of_a_call_are_bounded_as_by_grpc() -> None:
    extension = Extension()
    bound_metadata(extension)
    most = MOST_BYTES // FIELD
    asyncio.run(extension._handle_rpc(most))
    assert extension.fields == 101 * most, "what a handler or a client reads later is not counted"
    extension.fields = 0
    with pytest.raises(TooMuchMetadata):
        asyncio.run(extension._handle_rpc(1_000_000))
    assert extension.fields == most
    asyncio.run(extension._handle_rpc(most))


def test_an_unreadable_call_does_not_bound_later_metadata() -> None:
    extension = Extension()
    bound_metadata(extension)
    with pytest.raises(UnicodeError):
        asyncio.run(extension._handle_rpc(-1))
    for _ in range(1_000):
        extension._Metadatum("key", "value")


def test_an_incompatible_grpcio_is_logged_and_left_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    other = SimpleNamespace(_Metadatum=tuple, _handle_rpc=None)
    with caplog.at_level(logging.WARNING):
        bound_metadata(other)
    assert "this grpcio has no _handle_rpc, _find_method_handler: a stranger" in caplog.text
    assert other._Metadatum is tuple
