"""What was lent and is taken back while another reads it: nothing that was made of it is believed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from unit.links.halves_link import soon
from unit.links.shm_pair import Halves, frame, halves, in_arena

from paceline._links.base import LinkEnded
from paceline._links.shm.arena import Arena
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

MIB = 1 << 20
LOST = Verdict(1, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost")


@contextmanager
def lending() -> Iterator[tuple[Halves, np.ndarray]]:
    """Two halves whose reader gives back what it has read, and 1 MiB of ones that was lent to it."""
    arena = Arena()
    x = in_arena(arena, MIB, 1)
    with halves(arena) as both:
        both.incoming.release()
        both.outgoing.lend(frame(x.data), soon())
        yield both, x


@pytest.mark.parametrize("read_before", [True, False])
def test_a_recalled_payload_makes_the_reader_raise_link_ended(read_before: bool) -> None:
    with lending() as (both, x):
        if read_before:
            both.incoming.recv(0.0)
        both.writer.settle(LOST)
        both.outgoing.recall()
        x[:] = 9
        with pytest.raises(LinkEnded, match="took back") as info:
            both.incoming.release() if read_before else both.incoming.recv(0.0)
        assert not info.value.orderly
        both.incoming.release()


def test_recall_does_not_affect_released_or_copied_payloads() -> None:
    with lending() as (both, x):
        both.incoming.recv(0.0)
        both.incoming.release()
        both.outgoing.await_release(0.0)
        both.outgoing.send(frame(x.data), soon())
        both.outgoing.recall()
        assert both.incoming.recv(0.0).payload == bytes([1]) * MIB
        both.incoming.release()


def test_release_raises_if_a_concurrent_recall_changed_the_payload() -> None:
    """Whatever the reader has made of a payload, its release says whether it may be believed."""
    arena = Arena()
    for turn in range(30):
        x = in_arena(arena, 4 * MIB, 1)
        with halves(arena) as both:
            both.incoming.release()
            both.outgoing.lend(frame(x.data), soon())
            reading = threading.Event()

            def take_back(both: Halves = both, x: np.ndarray = x, reading: threading.Event = reading) -> None:
                reading.wait(10.0)
                both.outgoing.recall()
                x[:] = 9

            thread = threading.Thread(target=take_back)
            thread.start()
            got = both.incoming.recv(soon())
            if turn % 2:
                reading.set()
            sums = [int(part.sum()) for part in np.split(np.frombuffer(got.payload, np.uint8), 64)]
            try:
                both.incoming.release()
                believed = True
            except LinkEnded:
                believed = False
            reading.set()
            thread.join()
            assert not believed or sums == [len(x) // 64] * 64
