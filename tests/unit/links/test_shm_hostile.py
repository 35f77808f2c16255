"""A peer that writes what it likes where it may: every reader and writer ends with a typed error that names it (I9)."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.links.shm_pair import PEERS, descriptors, halves

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.base import MARKS, LinkEnded, LinkTimeout
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.shm import incoming
from paceline._links.shm.control_segment import (
    CONTROL_BYTES,
    DESCRIPTOR,
    INLINE_BYTES,
    MARK,
    MARKS_AT,
    MAX_PAYLOAD_BYTES,
    SLOT_BYTES,
    SLOTS,
    SLOTS_AT,
    STAGING_AT,
    STAGING_BYTES,
    TOLD_AT,
)
from paceline._links.shm.incoming import ShmIncoming
from paceline._links.shm.outgoing import ANNOUNCEMENT
from paceline._links.shm.segment import Segment, attach
from paceline.errors import LimitExceeded, PacelineError, PeerBrokeProtocol

SLOT, STAGING, ARENA = 1, 2, 3
NUMBER, KIND, PART, GENERATION, OPERATION, PLACE, WORDS, SIZE, SEGMENT, OFFSET = range(10)
GOOD = (0, 1, 0, 1, 1, SLOT, 0, 0, 0, 0)


@dataclass
class Writer:
    """The hand of a hostile writer."""

    control: Segment
    bell: int
    sock: socket.socket
    incoming: ShmIncoming
    fault: Fault

    def describe(self, *, ring: int = 1, **fields: int) -> None:
        words = list(GOOD)
        for name, value in fields.items():
            words[globals()[name]] = value
        DESCRIPTOR.pack_into(self.control.memory, SLOTS_AT + words[NUMBER] % SLOTS * SLOT_BYTES, *words)
        if ring:
            os.eventfd_write(self.bell, ring)

    def announce(self, data: bytes, *descriptors: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.sock.sendmsg([data], rights)


@contextmanager
def hostile_writer() -> Iterator[Writer]:
    loop = asyncio.new_event_loop()
    control = Segment(CONTROL_BYTES)
    control.back(STAGING_AT)
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    bell, room = os.eventfd(0, flags), os.eventfd(0, flags)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    fault = Fault(1, 1, 0.0)
    reader = ShmIncoming(fault, PEERS[0], loop, theirs, attach(control.fd, CONTROL_BYTES), os.dup(bell), os.dup(room))
    try:
        yield Writer(control, bell, ours, reader, fault)
    finally:
        reader.close()
        control.close()
        ours.close()
        os.close(bell)
        os.close(room)
        loop.close()


@pytest.fixture
def writer() -> Iterator[Writer]:
    with hostile_writer() as made:
        yield made


def accuses(writer: Writer, text: str) -> None:
    with pytest.raises(PeerBrokeProtocol, match=text) as info:
        writer.incoming.recv(monotonic() + 5.0)
    assert info.value.ranks == (0,)
    assert str(PEERS[0]) in str(info.value)
    with pytest.raises(PeerBrokeProtocol):
        writer.incoming.recv(monotonic() + 5.0)


def test_a_valid_descriptor_is_received_as_a_frame(writer: Writer) -> None:
    writer.describe(SIZE=INLINE_BYTES, WORDS=MAX_SIGNATURE_BYTES)
    assert len(writer.incoming.recv(0.0).payload) == INLINE_BYTES
    writer.describe(NUMBER=1, PLACE=STAGING, SIZE=MAX_PAYLOAD_BYTES, OFFSET=CONTROL_BYTES - MAX_PAYLOAD_BYTES)
    assert len(writer.incoming.recv(0.0).payload) == MAX_PAYLOAD_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        {"NUMBER": 64},
        {"NUMBER": 2**64 - 64},
        {"KIND": 0},
        {"KIND": 2},
        {"KIND": 2**32 - 1},
        {"GENERATION": 0},
        {"GENERATION": 2},
        {"GENERATION": 2**64 - 1},
        {"PLACE": 0},
        {"PLACE": 4},
        {"PLACE": 5},
        {"PLACE": 2**32 - 1},
        {"WORDS": MAX_SIGNATURE_BYTES + 1},
        {"WORDS": 2**32 - 1},
        {"SIZE": INLINE_BYTES + 1},
        {"SIZE": 2**64 - 1},
        {"PLACE": STAGING, "SIZE": 10, "OFFSET": STAGING_AT - 1},
        {"PLACE": STAGING, "SIZE": 10, "OFFSET": 0},
        {"PLACE": STAGING, "SIZE": 10, "OFFSET": STAGING_AT + STAGING_BYTES - 9},
        {"PLACE": STAGING, "SIZE": 10, "OFFSET": 2**64 - 5},
        {"PLACE": STAGING, "SIZE": MAX_PAYLOAD_BYTES + 1, "OFFSET": STAGING_AT},
        {"PLACE": ARENA, "SIZE": 10},
        {"PLACE": ARENA, "SIZE": 10, "SEGMENT": 2**64 - 1},
    ],
)
def test_an_invalid_descriptor_raises_peer_broke_protocol(writer: Writer, fields: dict[str, int]) -> None:
    writer.describe(**fields)
    accuses(writer, "broke the protocol")


def test_an_unknown_payload_place_is_refused_even_for_a_known_segment(writer: Writer) -> None:
    segment = Segment(4096)
    writer.announce(ANNOUNCEMENT.pack(7, 4096), segment.fd)
    segment.close()
    writer.describe(PLACE=4, SEGMENT=7, SIZE=10)
    accuses(writer, "a payload in place 4")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (SLOTS + 1, f"{SLOTS + 1} frames"),
        (MARK - 1, f"{MARK - 1} frames"),
        (2**63 + SLOTS + 1, f"{SLOTS + 1} frames"),
        (MARK * (MARKS + 1), f"0 frames and {MARKS + 1} marks"),
    ],
)
def test_a_bell_count_above_the_limit_raises_peer_broke_protocol(writer: Writer, count: int, text: str) -> None:
    writer.describe(ring=count)
    accuses(writer, f"rang for {text}")


def test_a_bell_count_without_a_frame_raises_peer_broke_protocol(writer: Writer) -> None:
    writer.describe(ring=2)
    writer.incoming.recv(0.0)
    accuses(writer, "where frame 1 was due")


@pytest.mark.parametrize("wait", ["recv", "await_mark"])
def test_hints_without_a_bell_count_do_not_delay_a_timeout(writer: Writer, wait: str) -> None:
    writer.control.array[TOLD_AT : MARKS_AT + 8 * MARKS] = 0xFF
    with pytest.raises(LinkTimeout):
        getattr(writer.incoming, wait)(monotonic() + 0.05)


def test_a_repeated_frame_number_raises_peer_broke_protocol(writer: Writer) -> None:
    for number in range(SLOTS):
        writer.describe(NUMBER=number)
        writer.incoming.recv(0.0)
    writer.describe(NUMBER=0)
    accuses(writer, f"where frame {SLOTS} was due")


@pytest.mark.parametrize(
    ("size", "offset", "wrong"),
    [(10, 0, False), (4096, 0, False), (4097, 0, True), (1, 4096, True), (1, 2**64 - 1, True)],
)
def test_a_payload_outside_its_segment_raises_peer_broke_protocol(
    writer: Writer, size: int, offset: int, wrong: bool
) -> None:
    segment = Segment(4096)
    writer.announce(ANNOUNCEMENT.pack(7, 4096), segment.fd)
    segment.close()
    writer.describe(PLACE=ARENA, SEGMENT=7, SIZE=size, OFFSET=offset)
    if wrong:
        accuses(writer, "in a segment of 4096")
    else:
        assert len(writer.incoming.recv(0.0).payload) == size


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"x", "none", "an announcement of 1 bytes"),
        (bytes(100), "sealed", "an announcement of 17 bytes"),
        (ANNOUNCEMENT.pack(7, 8192), "sealed", "4096 bytes, not 8192"),
        (ANNOUNCEMENT.pack(7, 2**64 - 1), "sealed", "4096 bytes, not"),
        (ANNOUNCEMENT.pack(7, 4096), "unsealed", "cut short"),
        (ANNOUNCEMENT.pack(7, 4096), "eventfd", "not one of sealed memory"),
        (ANNOUNCEMENT.pack(7, 4096), "two", "segment 7 twice"),
    ],
)
def test_an_invalid_announcement_raises_peer_broke_protocol(writer: Writer, data: bytes, kind: str, text: str) -> None:
    segment = Segment(4096)
    plain = os.memfd_create("test")
    os.ftruncate(plain, 4096)
    before = descriptors()
    given = {"none": [], "sealed": [segment.fd], "unsealed": [plain], "eventfd": [writer.bell], "two": [segment.fd]}
    writer.announce(data, *given[kind])
    if kind == "two":
        writer.announce(data, *given[kind])
    writer.describe(PLACE=ARENA, SEGMENT=8, SIZE=10)
    accuses(writer, text)
    assert descriptors() <= before + 1, "only the mapping of the one that was right"
    segment.close()
    os.close(plain)


def test_surplus_file_descriptors_are_closed(writer: Writer) -> None:
    segment = Segment(4096)
    before = descriptors()
    writer.announce(ANNOUNCEMENT.pack(7, 4096), segment.fd, *[writer.bell] * 200)
    writer.announce(ANNOUNCEMENT.pack(7, 0), *[writer.bell] * 200)
    writer.describe(PLACE=ARENA, SEGMENT=7, SIZE=10)
    accuses(writer, "segment 7, which it has not handed over")
    assert descriptors() == before
    segment.close()


def test_a_full_file_descriptor_table_raises_limit_exceeded(writer: Writer) -> None:
    writer.announce(ANNOUNCEMENT.pack(7, 4096))  # as the kernel delivers it when the table is full
    writer.describe(PLACE=ARENA, SEGMENT=7, SIZE=10)
    with pytest.raises(LimitExceeded, match="no file descriptor left"):
        writer.incoming.recv(0.0)


def test_endless_announcements_do_not_block_recv(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "receive_descriptors", lambda *_: (ANNOUNCEMENT.pack(1, 0), []))
    writer.describe(PLACE=ARENA, SEGMENT=7, SIZE=10)
    accuses(writer, "segment 7, which it has not handed over")


def test_a_closed_writer_socket_does_not_end_the_link(writer: Writer) -> None:
    writer.sock.close()
    with pytest.raises(LinkTimeout):
        writer.incoming.recv(monotonic() + 0.01)
    writer.describe()
    writer.incoming.recv(0.0)


def test_releasing_more_frames_than_sent_raises_peer_broke_protocol() -> None:
    with halves() as both:
        both.outgoing.send(Frame(FrameKind.DATA, 1, 1, 0, b"", b""), monotonic() + 5.0)
        os.eventfd_write(both.incoming._room, 2)
        with pytest.raises(PeerBrokeProtocol, match="released 2 frames of 1") as info:
            both.outgoing.send(Frame(FrameKind.DATA, 1, 1, 0, b"", bytes(100_000)), monotonic() + 5.0)
        assert info.value.ranks == (1,)


def test_a_saturated_eventfd_counter_raises_peer_broke_protocol() -> None:
    with halves() as both:
        os.eventfd_write(both.incoming._bell.fd, 2**64 - 2)
        with pytest.raises(PeerBrokeProtocol, match="its bell"):
            both.outgoing.send(Frame(FrameKind.DATA, 1, 1, 0, b"", b""), monotonic() + 5.0)
    with halves() as both:
        both.outgoing.send(Frame(FrameKind.DATA, 1, 1, 0, b"", bytes(100_000)), monotonic() + 5.0)
        os.eventfd_write(both.incoming._room, 2**64 - 2)
        with pytest.raises(PeerBrokeProtocol, match="counter of released frames"):
            both.incoming.recv(0.0)


WORD = st.one_of(st.integers(0, 8), st.integers(2**32 - 8, 2**32 - 1))
LONG = st.one_of(
    st.integers(0, 100),
    st.sampled_from([INLINE_BYTES, STAGING_AT, CONTROL_BYTES, MAX_PAYLOAD_BYTES]),
    st.integers(0, 2**64 - 1),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(LONG, WORD, WORD, LONG, LONG, WORD, WORD, LONG, LONG, LONG), min_size=1, max_size=4), LONG)
@example([GOOD], 1)
def test_random_descriptors_yield_a_frame_or_a_typed_error(descriptors: list[tuple[int, ...]], ring: int) -> None:
    with hostile_writer() as writer:
        segment = Segment(4096)
        writer.announce(ANNOUNCEMENT.pack(1, 4096), segment.fd)
        segment.close()
        for slot, words in enumerate(descriptors):
            DESCRIPTOR.pack_into(writer.control.memory, SLOTS_AT + slot * SLOT_BYTES, *words)
        os.eventfd_write(writer.bell, min(ring, 2**64 - 2))
        try:
            for _ in range(5):
                got = writer.incoming.recv(0.0)
                assert len(bytes(got.payload)) <= MAX_PAYLOAD_BYTES
                assert len(got.signature) <= MAX_SIGNATURE_BYTES
                writer.incoming.release()
        except (PacelineError, LinkEnded, LinkTimeout):
            pass
