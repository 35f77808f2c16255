"""The queues between callers and the loop: a caller that waits for a verdict holds no lock that the loop needs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline import errors
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.fault import Fault, Suspicion
from paceline._links.outbox import OUTBOX_FRAMES, Outbox
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

LOST = ErrorReason.ERROR_REASON_PEER_LOST
LATER = 1e12  # a deadline that does not come


class Watched(Fault):
    """Tells when somebody waits for its verdict."""

    def __init__(self) -> None:
        super().__init__(1, 0, verdict_timeout=30.0)
        self.asked = threading.Event()

    def check(self) -> None:
        self.asked.set()
        super().check()


def test_a_sender_waiting_for_the_verdict_does_not_block_the_loop() -> None:
    loop = asyncio.new_event_loop()
    outbox, fault = Outbox(loop), Watched()
    fault.suspect(Suspicion(LOST, 1, 4, "as this member saw it"))
    caught: list[errors.PacelineError] = []

    def send() -> None:
        with pytest.raises(errors.PeerLost) as info:
            outbox.put(b"frame", LATER, fault)
        caught.append(info.value)

    sender, loops_part = threading.Thread(target=send), threading.Thread(target=outbox.put_last, args=(b"abort",))
    sender.start()
    assert fault.asked.wait(5.0)
    loops_part.start()  # what the loop does meanwhile
    loops_part.join(10.0)  # the sender waits for 30 s
    held_up = loops_part.is_alive()
    fault.settle(Verdict(1, LOST, (1,), 4, "as the coordinator decided"))
    sender.join()
    loops_part.join()
    loop.close()
    assert not held_up
    assert [str(error) for error in caught] == ["as the coordinator decided"]


def test_put_times_out_on_a_full_outbox_and_raises_on_an_ended_one() -> None:
    loop = asyncio.new_event_loop()
    outbox, fault = Outbox(loop), Fault(1, 0, verdict_timeout=0.1)
    for _ in range(OUTBOX_FRAMES):
        outbox.put(b"x", LATER, fault)
    with pytest.raises(LinkTimeout):
        outbox.put(b"x", 0.0, fault)
    outbox.end(LinkEnded("rank 1 left", orderly=True))
    with pytest.raises(LinkEnded, match="left"):
        outbox.put(b"x", LATER, fault)
    assert outbox.sent_bytes == OUTBOX_FRAMES
    loop.close()
