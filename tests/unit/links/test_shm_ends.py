"""Shared-memory halves: who is blocked is woken, and how a half ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic

import pytest
from unit.links.halves_link import soon
from unit.links.shm_pair import Halves, frame, halves, in_arena

from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.shm.arena import Arena
from paceline._links.shm.control_segment import SLOTS
from paceline.errors import PacelineError, PeerBrokeProtocol, PeerLost
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

MIB = 1 << 20
LOST = Verdict(1, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost")


@pytest.fixture
def both() -> Iterator[Halves]:
    with halves() as made:
        yield made


@pytest.mark.parametrize("call", ["send", "await_release", "recv"])
@pytest.mark.parametrize("how", ["fault", "end"])
def test_a_fault_or_an_end_wakes_a_blocked_thread(call: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    x = in_arena(arena, MIB, 1)
    with halves(arena) as both:
        if call == "await_release":
            both.outgoing.lend(frame(x.data), soon())
        if call == "send":
            for part in range(SLOTS):
                both.outgoing.send(frame(b"", part), soon())
        blocked = {
            "send": lambda: both.outgoing.send(frame(), monotonic() + 100.0),
            "await_release": lambda: both.outgoing.await_release(monotonic() + 100.0),
            "recv": lambda: both.incoming.recv(monotonic() + 100.0),
        }[call]
        caught: list[BaseException] = []
        sleeps = threading.Event()

        def noted(take: Callable[[float], int], deadline: float) -> int:
            sleeps.set()
            return take(deadline)

        for each in (both.incoming._bell, both.outgoing._room):
            each.slice_s = 3_600.0  # by itself it looks around only then
            monkeypatch.setattr(each, "take", partial(noted, each.take))

        def run() -> None:
            try:
                blocked()
            except (PacelineError, LinkEnded) as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert sleeps.wait(10.0)
        if how == "fault":
            both.writer.settle(LOST)
            both.reader.settle(LOST)
            both.outgoing.wake()
            both.incoming.wake()
        else:
            both.outgoing.end(LinkEnded("rank 1 is gone"))
            both.incoming.end(LinkEnded("rank 0 is gone"))
        thread.join(20.0)
        (error,) = caught
        assert isinstance(error, PeerLost if how == "fault" else LinkEnded)
        for _ in range(2):  # at once, though the wake is used up
            with pytest.raises(PeerLost if how == "fault" else LinkEnded):
                blocked()


def test_a_wake_without_a_failure_or_end_has_no_effect(both: Halves) -> None:
    both.incoming.wake()
    both.outgoing.wake()
    started = monotonic()
    with pytest.raises(LinkTimeout):
        both.incoming.recv(started + 0.01)
    assert monotonic() - started >= 0.01
    both.outgoing.send(frame(b"x"), soon())
    assert both.incoming.recv(0.0).payload == b"x"


def test_all_sent_frames_are_received_before_the_end(both: Halves) -> None:
    for part in range(5):
        both.outgoing.send(frame(b"x" * 10_000, part), soon())
    both.outgoing.flush(soon())
    both.incoming.end(LinkEnded("rank 0 left", orderly=True), both.outgoing.frames)
    both.outgoing.close()
    assert [both.incoming.recv(soon()).part for _ in range(5)] == list(range(5))
    for _ in range(2):
        with pytest.raises(LinkEnded, match="left") as info:
            both.incoming.recv(soon())
        assert info.value.orderly


@pytest.mark.parametrize("said", [1, 3])
def test_a_wrong_frame_count_at_the_end_raises_peer_broke_protocol(both: Halves, said: int) -> None:
    for part in range(2):
        both.outgoing.send(frame(b"x", part), soon())
    both.incoming.end(LinkEnded("rank 0 left", orderly=True), said)
    both.incoming.recv(soon())
    both.incoming.recv(soon())
    with pytest.raises(PeerBrokeProtocol, match="rank 0"):
        both.incoming.recv(soon())
