"""The two halves against each other: wrapping, backpressure, lending, taking back, and how they end."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from itertools import count
from time import monotonic

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.links.halves_link import soon
from unit.links.shm_pair import Halves, frame, halves, in_arena

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.frame import Frame, FrameError
from paceline._links.shm.arena import Arena
from paceline._links.shm.bell import _WAKE
from paceline._links.shm.control_segment import (
    INLINE_BYTES,
    MARK,
    MAX_PAYLOAD_BYTES,
    SLOTS,
    STAGING_BYTES,
    staging_bytes,
)
from paceline.errors import LimitExceeded, PeerLost
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

MIB = 1 << 20
MANY = 16
"""Neighbours, of whose links each has 3 MiB of staging."""
LOST = Verdict(1, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost")


@pytest.fixture
def both() -> Iterator[Halves]:
    with halves() as made:
        yield made


def same(got: Frame, sent: Frame) -> bool:
    fields = ("kind", "generation", "operation", "part", "signature")
    return all(getattr(got, name) == getattr(sent, name) for name in fields) and bytes(got.payload) == bytes(
        sent.payload
    )


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, MIB, MAX_PAYLOAD_BYTES])
@pytest.mark.parametrize("signature", [b"", b"x", b"y" * MAX_SIGNATURE_BYTES])
def test_payloads_and_signatures_of_every_size_arrive_unchanged(both: Halves, size: int, signature: bytes) -> None:
    sent = frame(os.urandom(size), 2**32 - 1, signature)
    for _ in range(3):
        both.outgoing.send(sent, soon())
        assert same(both.incoming.recv(0.0), sent)
        both.incoming.release()
    assert (both.outgoing.frames, both.outgoing.sent_bytes) == (3, 3 * size)


def test_send_refuses_an_oversized_payload_or_signature(both: Halves) -> None:
    for wrong in (frame(bytes(MAX_PAYLOAD_BYTES + 1)), frame(b"", 0, b"x" * (MAX_SIGNATURE_BYTES + 1))):
        with pytest.raises(FrameError):
            both.outgoing.send(wrong, soon())
    both.outgoing.send(frame(b"good"), soon())
    assert both.incoming.recv(0.0).payload == b"good"


SIZES = st.one_of(
    st.integers(0, 64),
    st.sampled_from([INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, MIB, 3 * MIB + 5, MAX_PAYLOAD_BYTES]),
    st.integers(0, 2 * MIB),
)
STEPS = st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 6), st.booleans()), max_size=60)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS, st.sampled_from([1, MANY]))
def test_sent_and_lent_frames_arrive_in_order_and_unchanged(
    steps: list[tuple[int, bool, int, bool]], neighbours: int
) -> None:
    arena = Arena()
    source = in_arena(arena, MAX_PAYLOAD_BYTES, 0)
    source[:] = np.random.default_rng(1).integers(0, 256, len(source), np.uint8)
    with halves(arena, neighbours) as both:
        due: deque[Frame] = deque()
        for part, (size, lent, reads, releases) in enumerate(steps):
            sent = frame(source[part : part + size].data[:size], part, b"op"[: part % 3])
            send = both.outgoing.lend if lent else both.outgoing.send
            for turn in count():
                try:
                    send(sent, 0.0)
                except LinkTimeout:  # full: the reader goes on
                    assert due or not turn, "no room where nothing is on its way, or held"
                    if due:
                        assert same(both.incoming.recv(0.0), due.popleft())
                    both.incoming.release()
                else:
                    due.append(sent)
                    break
            for _ in range(min(reads, len(due))):
                assert same(both.incoming.recv(0.0), due.popleft())
            if releases:
                both.incoming.release()
        while due:
            assert same(both.incoming.recv(0.0), due.popleft())
        with pytest.raises(LinkTimeout):
            both.incoming.recv(0.0)
        both.incoming.release()
        both.outgoing.await_release(0.0)


def test_slots_are_reused_as_the_ring_wraps(both: Halves) -> None:
    for part in range(10 * SLOTS + 3):
        both.outgoing.send(frame(part.to_bytes(4, "big"), part), 0.0)
        got = both.incoming.recv(0.0)
        assert (got.part, got.payload) == (part, part.to_bytes(4, "big"))


def test_a_full_ring_blocks_the_writer_until_the_reader_reads(both: Halves) -> None:
    for part in range(SLOTS):
        both.outgoing.send(frame(b"x", part), 0.0)
    with pytest.raises(LinkTimeout, match=r"rank 1 .* receives nothing"):
        both.outgoing.send(frame(b"x", SLOTS), 0.0)
    sent = threading.Thread(target=both.outgoing.send, args=(frame(b"x", SLOTS), soon()))
    sent.start()
    parts = [both.incoming.recv(soon()).part for _ in range(SLOTS + 1)]
    sent.join()
    assert parts == list(range(SLOTS + 1))


def test_full_staging_blocks_the_writer_until_the_reader_reads(both: Halves) -> None:
    fit = STAGING_BYTES // MIB
    for part in range(fit):
        both.outgoing.send(frame(bytes([part]) * MIB, part), 0.0)
    with pytest.raises(LinkTimeout):
        both.outgoing.send(frame(bytes(MIB), fit), 0.0)
    both.outgoing.send(frame(b"small", fit), 0.0)  # has room in its slot
    for part in range(fit):
        assert both.incoming.recv(0.0).payload == bytes([part]) * MIB
    both.outgoing.send(frame(bytes(MAX_PAYLOAD_BYTES), fit + 1), 0.0)
    assert both.incoming.recv(0.0).payload == b"small"
    assert len(both.incoming.recv(0.0).payload) == MAX_PAYLOAD_BYTES


def test_staging_is_limited_to_a_share_except_for_a_larger_payload() -> None:
    assert staging_bytes(MANY) == 3 * MIB
    with halves(neighbours=MANY) as both:
        for part in range(3):
            both.outgoing.send(frame(bytes([part]) * MIB, part), 0.0)
        with pytest.raises(LinkTimeout):
            both.outgoing.send(frame(b"!" * MIB), 0.0)
        assert [bytes(both.incoming.recv(0.0).payload[:1]) for _ in range(3)] == [b"\0", b"\1", b"\2"]
        both.outgoing.send(frame(b"x" * MAX_PAYLOAD_BYTES), 0.0)
        with pytest.raises(LinkTimeout):  # the longer one has all of it
            both.outgoing.send(frame(b"!" * MIB), 0.0)
        assert both.incoming.recv(0.0).payload == b"x" * MAX_PAYLOAD_BYTES


def test_received_payloads_stay_valid_until_the_reader_releases_them(both: Halves) -> None:
    both.incoming.release()
    held = []
    for part in range(STAGING_BYTES // MIB):
        both.outgoing.send(frame(bytes([part]) * MIB, part), 0.0)
        held.append(both.incoming.recv(0.0))
    with pytest.raises(LinkTimeout):
        both.outgoing.send(frame(bytes(MIB)), 0.0)
    assert all(got.payload == bytes([part]) * MIB for part, got in enumerate(held))
    assert all(isinstance(got.payload, memoryview) and got.payload.readonly for got in held)
    both.incoming.release()
    both.outgoing.send(frame(bytes(MIB)), 0.0)


def test_recv_writes_a_payload_of_matching_size_into_the_target(both: Halves) -> None:
    for size in (100, MIB):
        target = memoryview(bytearray(size))
        both.outgoing.send(frame(b"x" * size), 0.0)
        assert both.incoming.recv(0.0, target).payload is target
        assert target == b"x" * size
        both.outgoing.send(frame(b"y" * (size - 1)), 0.0)
        assert both.incoming.recv(0.0, target).payload == b"y" * (size - 1)
        assert target == b"x" * size


def test_a_payload_lent_from_the_arena_is_not_copied() -> None:
    arena = Arena()
    with halves(arena) as both:
        both.incoming.release()
        for _ in range(2):  # the second time the peer knows the segment
            x = in_arena(arena, MIB, 1)
            both.outgoing.lend(frame(x.data), soon())
            got = both.incoming.recv(0.0)
            x[:] = 2
            assert got.payload == bytes([2]) * MIB, "it was copied"
            with pytest.raises(LinkTimeout, match="has not finished reading"):
                both.outgoing.await_release(0.0)
            both.incoming.release()
            both.outgoing.await_release(0.0)
        both.outgoing.send(frame(x.data), soon())
        x[:] = 3
        assert both.incoming.recv(0.0).payload == bytes([2]) * MIB, "what is sent is copied"


def test_a_payload_lent_from_outside_the_arena_is_copied_at_once(both: Halves) -> None:
    x = bytearray(MIB)
    both.outgoing.lend(frame(memoryview(x)), soon())
    both.outgoing.await_release(0.0)
    x[:] = b"x" * MIB
    assert both.incoming.recv(0.0).payload == bytes(MIB)


def test_the_reader_drops_a_segment_that_the_writer_retired() -> None:
    arena = Arena()
    with halves(arena) as both:
        both.incoming.release()
        for value in range(3):
            x = in_arena(arena, 65 * MIB, value)  # with a segment of its own
            both.outgoing.lend(frame(x[:MIB].data), soon())
            got = both.incoming.recv(0.0)
            assert got.payload == bytes([value]) * MIB
            both.incoming.release()
            both.outgoing.await_release(0.0)
            assert len(both.incoming._segments._segments) == 1
            del x, got
        with pytest.raises(LinkTimeout):
            both.incoming.recv(monotonic() + 0.001)
        assert not both.incoming._segments._segments, "even while nothing comes"


def test_a_payload_is_copied_when_its_segment_cannot_be_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    x = in_arena(arena, MIB, 1)
    with halves(arena) as both:
        both.outgoing._sock.close()
        both.outgoing.lend(frame(x.data), soon())
        both.outgoing.await_release(0.0)
        assert both.incoming.recv(0.0).payload == bytes([1]) * MIB


def test_on_readable_notifies_of_each_arrival_and_of_the_end(both: Halves) -> None:
    rung = threading.Event()
    both.incoming.on_readable(rung.set)
    assert rung.is_set()
    for part in range(3):  # whether what came before was read or not
        rung.clear()
        both.outgoing.send(frame(b"", part), soon())
        assert rung.wait(5.0)
    rung.clear()
    both.incoming.end(LinkEnded("gone"))
    assert rung.is_set()
    later = threading.Event()
    both.incoming.on_readable(later.set)
    assert later.is_set()


def test_send_without_staging_memory_raises_limit_exceeded_and_recovers(
    both: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out(*_: object) -> None:
        raise OSError(errno.ENOSPC, "there is none left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", out)
        with pytest.raises(LimitExceeded, match="there is none left"):
            both.outgoing.send(frame(bytes(MIB)), soon())
        both.outgoing.send(frame(b"small"), soon())
    both.outgoing.send(frame(b"x" * MIB), soon())
    assert both.incoming.recv(0.0).payload == b"small"
    assert both.incoming.recv(0.0).payload == b"x" * MIB


def test_unused_staging_takes_no_memory(both: Halves) -> None:
    at_first = os.fstat(both.outgoing._segment.fd).st_blocks * 512
    both.outgoing.send(frame(b"x" * MIB), soon())
    assert at_first < MIB
    assert os.fstat(both.outgoing._segment.fd).st_blocks * 512 <= at_first + MIB


@pytest.mark.parametrize("wait", ["recv", "await_mark"])
@pytest.mark.parametrize("beside", [0, MARK], ids=["alone", "with a mark"])
def test_a_failure_ends_a_wait_even_if_its_wake_comes_with_a_mark(
    both: Halves, wait: str, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.incoming._bell.slice_s = 3_600.0  # by itself it looks around only then
    sleeps, ended = threading.Event(), threading.Event()
    take = both.incoming._bell.take

    def noted(deadline: float) -> int:
        sleeps.set()
        return take(deadline)

    def waits() -> None:
        try:
            for _ in range(2):  # a mark that is there is taken first
                getattr(both.incoming, wait)(monotonic() + 100.0)
        except PeerLost:
            ended.set()

    monkeypatch.setattr(both.incoming._bell, "take", noted)
    thread = threading.Thread(target=waits)
    thread.start()
    assert sleeps.wait(10.0)
    both.reader.settle(LOST)
    os.eventfd_write(both.incoming._bell.fd, _WAKE + beside)
    assert ended.wait(20.0), "rule 4"
    thread.join(10.0)
