"""The way in: frames that come in parts, frames that are none, and ends."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
import zlib

import pytest
from unit.links.halves_link import soon
from unit.links.tcp_pair import data, on_loop, one_way, raw_writer

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.frame import MAX_FRAME_BYTES
from paceline._links.kind import ProtocolError
from paceline._links.tcp._tcp_wire import HEAD_BYTES, cut, encode_head


def test_payloads_stay_valid_until_they_are_released() -> None:
    with one_way() as way:
        for round_ in range(3):
            for part in range(20):  # more than the half remembers
                way.out.send(data(bytes([round_ * 20 + part]) * 10_000), soon())
            got = [way.into.recv(soon()).payload for _ in range(20)]
            assert [bytes(payload) for payload in got] == [bytes([round_ * 20 + p]) * 10_000 for p in range(20)]
            way.into.release()


@pytest.mark.parametrize("streams", [1, 3])
def test_a_partial_frame_survives_a_timeout_outside_the_callers_buffer(streams: int) -> None:
    payload = random.Random(1).randbytes(300_000)
    place = memoryview(bytearray(len(payload)))
    with raw_writer(streams) as raw:
        wire = [encode_head(data(payload, 5, b"words"))] + [b""] * (streams - 1)
        piece = -(-len(payload) // streams)
        for index in range(streams):
            wire[index] += payload[index * piece : (index + 1) * piece]
        rung = threading.Semaphore(0)
        raw.into.on_readable(rung.release)
        assert rung.acquire(timeout=10.0)
        for index, stream in enumerate(wire):
            for begin, end in ((0, 20), (20, 50_000), (50_000, len(stream))):
                with pytest.raises(LinkTimeout):
                    raw.into.recv(0.0, place)
                raw.into.release()
                place[:] = b"mine" * (len(place) // 4)
                raw.socks[index].sendall(stream[begin:end])
                assert rung.acquire(timeout=10.0), "more of the frame has come, and nobody was told"
        frame = raw.into.recv(soon(), place)
        assert (frame.part, frame.signature) == (5, b"words")
        assert bytes(frame.payload) == payload
        assert bytes(place[:4]) == b"mine"


def test_release_keeps_a_partially_received_frame() -> None:
    a, *others = (bytes([letter]) * 200_000 for letter in b"abcd")
    wire = b"".join(encode_head(data(payload)) + payload for payload in (a, *others))
    with raw_writer() as raw:
        raw.socks[0].sendall(wire[:300_000])
        assert raw.into.recv(soon()).payload == a
        with pytest.raises(LinkTimeout):
            raw.into.recv(0.0)
        raw.into.release()
        raw.socks[0].sendall(wire[300_000:])
        got = [raw.into.recv(soon()).payload for _ in others]
        assert [bytes(payload) for payload in got] == others


def test_an_interrupted_recv_no_longer_uses_the_callers_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    place = memoryview(bytearray(200_000))
    payload = b"z" * len(place)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with raw_writer() as raw:
        wire = encode_head(data(payload)) + payload
        raw.socks[0].sendall(wire[:100_000])
        with monkeypatch.context() as patch:
            patch.setattr("paceline._links.tcp._tcp_incoming.wait_ready", interrupt)
            with pytest.raises(KeyboardInterrupt):
                raw.into.recv(soon(), place)
        place[:] = bytes(len(place))
        raw.socks[0].sendall(wire[100_000:])
        assert bytes(raw.into.recv(soon()).payload) == payload
        assert not any(place)


def _head(**changes: int) -> bytes:
    """A header whose own checksum is right."""
    fields = {"mark": 0xA7, "words": 0, "size": 3, "part": 0, "checksum": zlib.crc32(b"abc"), "generation": 1}
    head = struct.pack("<HHIIIQQ", *(fields | changes).values(), 1)
    return head + zlib.crc32(head).to_bytes(4, "little")


@pytest.mark.parametrize(
    "head",
    [
        _head(mark=0x08),
        _head(words=MAX_SIGNATURE_BYTES + 1),
        _head(size=MAX_FRAME_BYTES),
        _head(size=2**32 - 1),
        _head(generation=2),
    ],
    ids=["mark", "words", "size", "huge", "generation"],
)
def test_a_bad_header_raises_protocol_error(head: bytes) -> None:
    with raw_writer() as raw:
        raw.socks[0].sendall(head + b"abc")
        for _ in range(2):
            with pytest.raises(ProtocolError) as info:
                raw.into.recv(soon(), memoryview(bytearray(3)))
            assert not info.value.orderly


def test_a_changed_byte_ends_the_link_at_once() -> None:
    """At once, and with no more of the frame than there is: a length that has changed is not waited for."""
    whole = encode_head(data(b"payload", signature=b"words")) + b"payload"
    for at in range(len(whole)):
        with raw_writer() as raw:
            raw.socks[0].sendall(whole + whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            assert raw.into.recv(soon()).payload == b"payload"
            for _ in range(2):
                with pytest.raises(LinkEnded, match="changed on the way") as info:
                    raw.into.recv(soon())
                assert not info.value.orderly
                assert not isinstance(info.value, ProtocolError), "the peer is not to blame"


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("at", [0, 99_999, 150_000, 299_999])
@pytest.mark.parametrize("is_callers", [False, True])
def test_a_changed_byte_in_a_payload_sent_in_pieces_ends_the_link(streams: int, at: int, is_callers: bool) -> None:
    payload = random.Random(2).randbytes(300_000)
    place = memoryview(bytearray(len(payload))) if is_callers else None
    with raw_writer(streams) as raw:
        for number, sent in enumerate((payload, payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])):
            head = encode_head(data(payload))  # what the writer had
            for index, begin, end in reversed(cut(len(sent), streams, number)):
                for start in range(begin, end, 30_000):
                    with pytest.raises(LinkTimeout):
                        raw.into.recv(0.0, place)
                    part = sent[start : min(start + 30_000, end)]
                    raw.socks[index].sendall(head + part if not start else part)
            if number:
                with pytest.raises(LinkEnded, match="changed on the way"):
                    raw.into.recv(soon(), place)
            else:
                assert raw.into.recv(soon(), place).payload == payload


@pytest.mark.parametrize("length", [1, HEAD_BYTES, HEAD_BYTES + 2, HEAD_BYTES + 4])
def test_an_end_in_the_middle_of_a_frame_is_not_orderly(length: int) -> None:
    with raw_writer() as raw:
        whole = encode_head(data(b"abc", signature=b"wo")) + b"abc"
        raw.socks[0].sendall(whole + whole[:length])
        raw.socks[0].close()
        assert raw.into.recv(soon()).payload == b"abc"
        for _ in range(2):
            with pytest.raises(LinkEnded, match="in the middle of a frame") as info:
                raw.into.recv(soon())
            assert not info.value.orderly


def test_a_reset_notifies_once_and_is_not_an_orderly_end() -> None:
    with raw_writer() as raw:
        rung = threading.Semaphore(0)
        raw.into.on_readable(rung.release)
        assert rung.acquire(timeout=10.0)
        raw.socks[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.socks[0].close()
        assert rung.acquire(timeout=10.0)
        for _ in range(3):
            on_loop(int)  # the loop has had its turn, and more
        assert not rung.acquire(blocking=False)
        with pytest.raises(LinkEnded, match="broke") as info:
            raw.into.recv(0.0)
        assert not info.value.orderly


def test_recv_after_eof_between_frames_waits_for_the_end_to_be_set() -> None:
    with raw_writer() as raw:
        raw.socks[0].sendall(encode_head(data(b"")))
        raw.socks[0].close()
        rung = threading.Event()
        raw.into.recv(soon())
        raw.into.on_readable(rung.set)
        with pytest.raises(LinkTimeout):
            raw.into.recv(time.monotonic() + 0.02)
        raw.into.end(LinkEnded("left", orderly=True), 1)
        with pytest.raises(LinkEnded, match="left") as info:
            raw.into.recv(soon())
        assert info.value.orderly


def test_fewer_frames_than_announced_is_not_an_orderly_end() -> None:
    with raw_writer() as raw:
        raw.socks[0].sendall(encode_head(data(b"")))
        raw.socks[0].close()
        raw.into.end(LinkEnded("left", orderly=True), 2)
        raw.into.recv(soon())
        with pytest.raises(LinkEnded, match="1 of 2") as info:
            raw.into.recv(soon())
        assert not info.value.orderly
