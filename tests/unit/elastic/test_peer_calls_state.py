"""A state taken from members over real sockets: from all at once, whoever dies, lies, keeps silent or refuses."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline._base.rpc import grpc
from paceline._base.waits import loop_thread
from paceline._elastic import offer, peer_calls
from paceline._elastic.offer import Content, OfferedState
from paceline._elastic.peer_calls import get_manifest, take_state
from paceline._links.base import Peer
from paceline._links.grpc_door import Door
from paceline._links.grpc_methods import refuse
from paceline.credentials import IN_THE_CLEAR, Credentials
from paceline.errors import LimitExceeded, LinkUnavailable, PacelineError
from paceline_protocol import Tag
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.flipping import Flipper
from support.relay import relay

JOB, TAG = "job", Tag(2, 5)
PATIENCE = 8.0
SHORT = 2.0
"""Patience with one that keeps silent; a busy machine may hold up the others for a while."""
CHUNKS = 40


class Donor(OfferedState):
    """A member with a door.

    Attributes:
        asked: chunks that were asked of it.
        befalls: called with the number of the request before a chunk is given; may change what is.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.befalls: Callable[[int], Any] = lambda count: None
        self.door = Door(JOB, IN_THE_CLEAR)
        port = loop_thread().run(self.door.start("127.0.0.1", 0))
        self.door.window.member_id = f"member-{rank}"
        self.door.window.source = self
        self.peer = Peer(rank, f"member-{rank}", f"host-{rank}", f"127.0.0.1:{port}", 100 + rank)

    def read(self, tag: Tag, chunk: int) -> bytes:
        self.asked.append(chunk)
        instead = self.befalls(len(self.asked))
        return super().read(tag, chunk) if instead is None else instead


def state(value: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(int(value))
    return {"w": rng.standard_normal(CHUNKS * 8 - 3), "n": value}


content_of = partial(Content.of, chunk_bytes=64)


@contextmanager
def donors(count: int, tree: Any = None) -> Iterator[list[Donor]]:
    with ExitStack() as stack:
        made = []
        for rank in range(count):
            donor = Donor(rank)
            stack.callback(lambda door=donor.door: loop_thread().run(door.close(0.0)))
            donor.offer(TAG, content_of(state() if tree is None else tree))
            made.append(donor)
        yield made


def take(givers: list[Donor], own: Any = None, patience: float = PATIENCE, **more: Any) -> Any:
    content = content_of(state(7) if own is None else own)
    peers = [giver.peer for giver in givers]
    taking = take_state(JOB, TAG, peers, content, patience, IN_THE_CLEAR, **more)
    taken = loop_thread().run(asyncio.wait_for(taking, 30))
    return taken.tree()


def test_all_donors_send_some_of_the_chunks() -> None:
    with donors(3) as givers:
        own = state(7)
        kept = own["w"].copy()
        sizes: list[int] = []
        np.testing.assert_equal(take(givers, own, received=sizes.append), state())
        assert sorted(chunk for giver in givers for chunk in giver.asked) == list(range(CHUNKS))
        assert all(giver.asked for giver in givers)
        assert sum(sizes) == state()["w"].nbytes
        np.testing.assert_array_equal(own["w"], kept)


def test_chunks_are_read_and_hashed_off_the_event_loop_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []
    real = offer.hash_of

    def hash_of(*pieces: Any) -> bytes:
        on_loop.append(loop_thread().is_current)
        return real(*pieces)

    monkeypatch.setattr(offer, "hash_of", hash_of)
    monkeypatch.setattr(peer_calls, "hash_of", hash_of)
    with donors(2) as givers:
        for giver in givers:
            giver.befalls = lambda count: on_loop.append(loop_thread().is_current)
        np.testing.assert_equal(take(givers), state())
    assert len(on_loop) >= 4 * CHUNKS, "hashed by the giver, compared, read by the giver, and hashed when it has come"
    assert not any(on_loop)


def test_only_16_of_20_donors_are_dialed(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = dials(monkeypatch)
    with donors(20) as givers:
        np.testing.assert_equal(take(givers), state())
    assert len(dialled) == len(set(dialled)) == 16


def test_more_donors_are_dialed_when_the_first_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = dials(monkeypatch)
    with donors(20) as givers:
        for giver in givers[:19]:
            giver.befalls = lambda count: bytes(64)
        np.testing.assert_equal(take(givers), state())
    assert givers[19].peer.address in dialled


def dials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that are dialled from now on."""
    dialled: list[str] = []

    def member_channel(self: Credentials, address: str, **how: Any) -> Any:
        dialled.append(address)
        return real(self, address, **how)

    real = Credentials.member_channel
    monkeypatch.setattr(Credentials, "member_channel", member_channel)
    return dialled


def test_no_chunk_is_sent_when_states_are_equal() -> None:
    with donors(2) as givers:
        np.testing.assert_equal(take(givers, state()), state())
        assert not any(giver.asked for giver in givers)


def test_only_differing_chunks_are_sent() -> None:
    with donors(1) as givers:
        own = state()
        own["w"][100] += 1
        np.testing.assert_equal(take(givers, own), state())
        assert givers[0].asked == [12]


def test_a_state_without_array_data_is_taken() -> None:
    with donors(1, {"n": 3, "e": np.zeros((0, 2))}) as givers:
        np.testing.assert_equal(take(givers, {"n": 4}), {"n": 3, "e": np.zeros((0, 2))})


def test_a_state_is_taken_over_a_link_with_latency() -> None:
    with donors(1) as givers, relay(givers[0].peer.address, seconds=0.3) as far:
        givers[0].peer = replace(givers[0].peer, address=far.address)
        np.testing.assert_equal(take(givers), state())


def test_a_donor_that_sends_wrong_chunks_is_not_asked_again() -> None:
    with donors(3) as givers:
        givers[1].befalls = lambda count: bytes(64)
        np.testing.assert_equal(take(givers), state())
        assert len(givers[1].asked) <= 16, "a liar is not asked again"


def test_a_description_corrupted_in_transit_is_not_used() -> None:
    tree = state() | {"note": "a" * 64}
    flipper = Flipper(b"a" * 64)
    flipper.arm()
    with donors(2, tree) as givers, ExitStack() as stack:
        for giver in givers:
            way = stack.enter_context(relay(giver.peer.address, change=flipper))
            giver.peer = replace(giver.peer, address=way.address)
        np.testing.assert_equal(take(givers), tree)
        assert flipper.flipped.is_set()


def test_a_take_survives_a_donor_that_dies_midway() -> None:
    with donors(3) as givers:
        loop = loop_thread().loop

        def die(count: int) -> None:
            if count == 3:
                loop.create_task(givers[0].door.close(0.0))  # this is the loop's thread
                raise PacelineError("dead")

        givers[0].befalls = die
        np.testing.assert_equal(take(givers), state())


def test_a_take_survives_a_donor_that_withdraws_midway() -> None:
    with donors(2) as givers:
        givers[0].befalls = lambda count: givers[0].withdraw() if count == 3 else None
        np.testing.assert_equal(take(givers), state())


@contextmanager
def silent(donor: Donor, monkeypatch: pytest.MonkeyPatch, method: str) -> Iterator[None]:
    """It answers nothing until the end of the block."""
    until = threading.Event()
    original = donor.door.window._check

    async def never(*args: Any) -> Any:
        await asyncio.to_thread(until.wait, 10)
        return await original(*args)

    async def at_once(*args: Any) -> Any:
        return await original(*args)

    calls = 0

    async def check(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return await (never if method == "all" or calls > 1 else at_once)(*args)

    monkeypatch.setattr(donor.door.window, "_check", check)
    try:
        yield
    finally:
        until.set()


def test_a_take_survives_a_donor_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with donors(2) as givers, silent(givers[0], monkeypatch, "all"):
        np.testing.assert_equal(take(givers, patience=SHORT), state())


@pytest.mark.parametrize("chunks", [CHUNKS, 5])
def test_a_take_survives_a_donor_that_describes_but_sends_nothing(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few chunks it gets all of them, each time it is asked."""
    with donors(2) as givers, silent(givers[0], monkeypatch, "later"):
        own = state()
        own["w"][: chunks * 8] += 1
        np.testing.assert_equal(take(givers, own, SHORT), state())


def crowd(donor: Donor, monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Its door is crowded for so many calls; the list has the kinds of requests that it refuses."""
    refused: list[str] = []
    read = donor.door._requests._read

    async def refuse_some(name: str, context: Any) -> Any:
        if len(refused) < times:
            refused.append(name)
            await refuse(context, grpc.StatusCode.UNAVAILABLE, ErrorReason.ERROR_REASON_LIMIT, "too many calls")
        return await read(name, context)

    monkeypatch.setattr(donor.door._requests, "_read", refuse_some)
    return refused


def test_a_crowded_door_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with donors(1) as givers:
        givers[0].manifest = b"what it trains"
        refused = crowd(givers[0], monkeypatch, 2)
        assert loop_thread().run(get_manifest(JOB, givers[0].peer, PATIENCE, IN_THE_CLEAR)) == b"what it trains"
        assert refused == ["GetManifestRequest"] * 2
        refused = crowd(givers[0], monkeypatch, 2)
        np.testing.assert_equal(take(givers), state())
        assert refused == ["DescribeStateRequest"] * 2
        crowded_later: list[list[str]] = []

        def crowds(count: int) -> None:
            if count == 1:  # while the first chunks are given, before the others are asked for
                crowded_later.append(crowd(givers[0], monkeypatch, 2))

        givers[0].asked.clear()
        givers[0].befalls = crowds
        np.testing.assert_equal(take(givers), state())
        assert crowded_later == [["GetStateRequest"] * 2]


def test_a_door_that_stays_crowded_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with donors(2) as givers:
        crowd(givers[0], monkeypatch, 1_000)
        np.testing.assert_equal(take(givers, patience=SHORT), state())
        with pytest.raises(LinkUnavailable, match=f"{re.escape(str(givers[0].peer))}: too many calls"):
            take(givers[:1], patience=SHORT)
        with pytest.raises(LimitExceeded, match="too many calls"):
            loop_thread().run(get_manifest(JOB, givers[0].peer, SHORT, IN_THE_CLEAR))


def test_a_closed_door_is_not_retried_as_crowded() -> None:
    with donors(1) as givers:
        loop_thread().run(givers[0].door.close(0.0))
        with pytest.raises(LinkUnavailable):
            take(givers, patience=1_000.0)


def test_a_take_refused_by_all_donors_names_each_of_them() -> None:
    with donors(3) as givers:
        givers[0].withdraw()
        givers[1].offer(Tag(2, 6), content_of(state()))
        loop_thread().run(givers[2].door.close(0.0))
        with pytest.raises(LinkUnavailable) as caught:
            take(givers)
        text = str(caught.value)
        assert f"no member sent the state {TAG}" in text
        assert all(str(giver.peer) in text for giver in givers), text
        assert text.count("does not hold the state") == 2


def test_a_take_fails_if_all_donors_stop_midway() -> None:
    with donors(2) as givers:
        for giver in givers:
            giver.befalls = lambda count: bytes(3) if count > 2 else None
        with pytest.raises(LinkUnavailable, match="no member sent the rest") as caught:
            take(givers)
        assert all(str(giver.peer) in str(caught.value) for giver in givers)


def test_a_take_without_donors_raises_link_unavailable() -> None:
    with pytest.raises(LinkUnavailable, match="no member sent"):
        take([])


def test_an_implausibly_large_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with donors(1) as givers:
        monkeypatch.setattr(givers[0], "describe", lambda tag: Huge())
        with pytest.raises(LinkUnavailable, match="implausible for this model"):
            take(givers)


class Huge:
    hashes = b""

    def to_json(self) -> bytes:
        return b'{"skeleton": null, "arrays": [["w", "float32", [1000000000]]], "spread": []}'


def test_get_manifest_returns_the_manifest_of_the_named_member_only() -> None:
    with donors(1) as givers:
        givers[0].manifest = b"what it trains"
        assert loop_thread().run(get_manifest(JOB, givers[0].peer, PATIENCE, IN_THE_CLEAR)) == b"what it trains"
        stranger = Peer(0, "somebody else", "h", givers[0].peer.address)
        with pytest.raises(PacelineError, match="this is not member"):
            loop_thread().run(get_manifest(JOB, stranger, PATIENCE, IN_THE_CLEAR))
        loop_thread().run(givers[0].door.close(0.0))
        with pytest.raises(PacelineError):
            loop_thread().run(get_manifest(JOB, givers[0].peer, 0.05, IN_THE_CLEAR))
