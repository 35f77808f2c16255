"""Tcp halves: the rules of every link, and what is theirs alone: taking back, waking, several streams."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.links.halves_link import soon
from unit.links.tcp_pair import OneWay, data, one_way, tcp_link_pair

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.fault import Fault
from paceline._links.frame import MAX_FRAME_BYTES, FrameError
from paceline._links.tcp import _tcp_kind
from paceline._links.tcp._tcp_outgoing import MAX_WAITING_BYTES, TcpOutgoing
from paceline._links.tcp._tcp_sockets import SendStream, Stream
from paceline._links.tcp._tcp_wire import MIN_PIECE
from paceline.credentials import IN_THE_CLEAR, Credentials
from paceline.errors import PacelineError
from paceline.testing import check_link
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.certificates import make_folder

_MIB = 1 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return make_folder(tmp_path_factory.mktemp("tls") / "certs").credentials


@pytest.fixture(params=["in the clear", "with TLS"])
def credentials(request: pytest.FixtureRequest, tls: Credentials) -> Credentials:
    return tls if request.param == "with TLS" else IN_THE_CLEAR


def _fail(fault: Fault) -> None:
    fault.settle(Verdict(1, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost"))


def _in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Runs it in a thread; what it raised, once the thread has ended."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("streams", [1, 4])
def test_tcp_links_keep_the_rules(streams: int, credentials: Credentials) -> None:
    check_link(partial(tcp_link_pair, streams, credentials))


def test_tcp_links_keep_the_rules_without_eventfd_epoll_and_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((os, "eventfd"), (os, "sched_yield"), (select, "epoll"), (select, "poll")):
        monkeypatch.delattr(module, name)
    monkeypatch.setattr(_tcp_kind, "make_stream", SendStream)
    check_link(partial(tcp_link_pair, 2))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    streams=st.integers(1, 16),
    sizes=st.lists(st.one_of(st.integers(0, 5000), st.integers(60_000, 600_000)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_random_frames_arrive_unchanged(streams: int, sizes: list[int], seed: int) -> None:
    chance = random.Random(seed)
    frames = [
        data(chance.randbytes(size), part, chance.randbytes(chance.choice([0, 1, MAX_SIGNATURE_BYTES])))
        for part, size in enumerate(sizes)
    ]
    with one_way(streams) as way:
        for frame in frames:
            chance.choice([way.out.send, way.out.lend])(frame, soon())
        for frame in frames:
            into = memoryview(bytearray(len(frame.payload)))
            got = way.into.recv(soon(), chance.choice([None, into, memoryview(bytearray(7))]))
            assert got == frame
            way.into.release()
        way.out.await_release(soon())
        assert way.out.frames == len(frames)
        assert way.out.sent_bytes == sum(sizes)


@pytest.mark.parametrize("streams", [1, 4])
def test_both_sides_may_send_before_either_reads(streams: int, credentials: Credentials) -> None:
    """Each side sends as much as the contract allows before either reads, and more once the other reads."""
    frames = [data(bytes([part]) * _MIB, part) for part in range(16)]
    with tcp_link_pair(streams, credentials) as pair:
        for link in (pair.a, pair.b):
            for frame in frames[:4]:
                link.lend(frame, 0.0)
        senders = [
            _in_thread(lambda link=link: [link.send(frame, soon()) for frame in frames[4:]])  # type: ignore[misc]
            for link in (pair.a, pair.b)
        ]
        for frame in frames:
            for link in (pair.b, pair.a):
                assert link.recv(soon()) == frame
                link.release()
        for thread, raised in senders:
            thread.join()
            assert not raised


def test_recv_writes_a_payload_of_matching_size_into_the_target() -> None:
    place = memoryview(bytearray(_MIB))
    with one_way(3) as way:
        for size in (_MIB, 100, 0):
            way.out.send(data(b"x" * size), soon())
            into = place[:size]
            assert way.into.recv(soon(), into).payload is into
            assert bytes(into) == b"x" * size
        way.out.send(data(b"y" * 100), soon())
        assert way.into.recv(soon(), place).payload == b"y" * 100  # it does not fit, and is put elsewhere
        assert place[0] == ord("x")


def test_an_interrupt_between_reading_and_accounting_ends_the_half() -> None:
    with one_way() as way:
        way.out.send(data(b"x"), soon())
        way.into._torn = way.out._torn = True
        for call in (lambda: way.into.recv(soon()), lambda: way.out.send(data(b"x"), soon())):
            with pytest.raises(LinkEnded, match="interrupted"):
                call()


def _fill(out: TcpOutgoing, frame: memoryview) -> int:
    """Lends until no more is taken, by the kernel neither; how many frames were."""
    count = 0
    while True:
        try:
            out.lend(data(frame, count), 0.0)
            count += 1
        except LinkTimeout:
            polled = [out._streams[index].fd for index in out._polled]
            if polled and not select.select([], polled, [], 0.02)[1]:
                return count


@pytest.mark.parametrize("streams", [1, 4])
def test_recall_stops_sending_lent_payloads(streams: int, credentials: Credentials) -> None:
    lent = bytearray(b"b" * 4 * _MIB)
    with one_way(streams, credentials) as way:
        count = _fill(way.out, memoryview(lent))
        got: list[bytes] = []
        _fail(way.fault_out)
        started = time.monotonic()
        way.out.recall()
        assert time.monotonic() - started < 10.0, "it waited for the reader"
        lent[:] = b"a" * len(lent)
        place = memoryview(bytearray(len(lent)))
        way.into.end(LinkEnded("as the gRPC side says"))  # needed only if the cut was between two frames
        with suppress(LinkEnded):
            while len(got) < count:
                got.append(bytes(way.into.recv(soon(), place).payload))
        assert len(got) < count
        assert not (b"".join(got) + bytes(place)).replace(b"b", b"").strip(b"\0")
        for lane in way.into._lanes:  # the peer does not wait for the rest
            lane.stream.sock.settimeout(10.0)
            while lane.stream.sock.recv(_MIB):
                pass
        with pytest.raises(PacelineError):
            way.out.send(data(b"x"), soon())
        lent.extend(b"x")  # nothing refers to it any more: this would be a BufferError


def test_send_copies_a_payload_that_waits_to_be_written(credentials: Credentials) -> None:
    buffer = bytearray(b"b" * _MIB)
    with one_way(2, credentials) as way:
        count = 0
        with suppress(LinkTimeout):
            while True:
                way.out.send(data(memoryview(buffer), count), 0.0)
                count += 1
        buffer[:] = b"a" * _MIB
        for _ in range(count):
            assert not bytes(way.into.recv(soon()).payload).strip(b"b")


def test_a_free_stream_is_written_while_another_is_full() -> None:
    long = memoryview(bytes(MIN_PIECE))
    with one_way(2) as way:
        out = way.out
        out.slice_s = 3_600.0  # by itself the thread that writes looks around only then
        fds = [stream.fd for stream in out._streams]
        while not (out._polled == {0} and not select.select([], fds[:1], [], 0.02)[1]):
            for payload in (long, b""):  # on the first stream, and on the second
                out.lend(data(payload), soon())
            with out._lock:  # else frames pile up here while the thread that writes has yet to run
                while out._queues[1] or (out._queues[0] and out._polled != {0}):
                    out._changed.wait(0.001)
        out.lend(data(long), soon())
        out.lend(data(b""), soon())
        with out._lock:
            assert out._changed.wait_for(lambda: not out._queues[1], 10.0)
        assert out._queues[0]


@pytest.mark.parametrize("streams", [1, 4])
def test_recall_during_a_read_delivers_no_bytes_changed_afterwards(streams: int, credentials: Credentials) -> None:
    size = 4 * _MIB

    def read(way: OneWay, got: memoryview) -> None:
        for begin in range(0, len(got), size):
            way.into.recv(soon(), got[begin : begin + size])

    for delay in range(8):
        lent = bytearray(b"b" * size)
        got = memoryview(bytearray(4 * size))
        with one_way(streams, credentials) as way:
            reader, _ = _in_thread(partial(read, way, got))
            with suppress(LinkTimeout):
                for part in range(4):
                    way.out.lend(data(memoryview(lent), part), time.monotonic() + delay / 2000)
            _fail(way.fault_out)
            way.out.recall()
            lent[:] = b"a" * size
            way.into.end(LinkEnded("as the gRPC side says"))
            reader.join()
        assert b"a" not in bytes(got)


@pytest.mark.parametrize("blocked", ["recv", "send", "await_release", "flush"])
def test_a_failure_wakes_blocked_threads(blocked: str, credentials: Credentials) -> None:
    with one_way(2, credentials) as way:
        way.into.slice_s = way.out.slice_s = 3_600.0  # by itself it looks around only then
        frame = memoryview(bytearray(_MIB))
        if blocked != "recv":
            _fill(way.out, frame)
        calls: dict[str, Callable[[], object]] = {
            "recv": lambda: way.into.recv(soon(100.0)),
            "send": lambda: way.out.send(data(frame), soon(100.0)),
            "await_release": lambda: way.out.await_release(soon(100.0)),
            "flush": lambda: way.out.flush(soon(100.0)),
        }
        thread, raised = _in_thread(calls[blocked])
        thread.join(0.02)
        assert thread.is_alive()
        _fail(way.fault_in if blocked == "recv" else way.fault_out)
        thread.join(20.0)
        assert isinstance(raised[0], PacelineError)


def test_a_send_that_times_out_sends_nothing() -> None:
    with one_way() as way:
        frame = memoryview(bytearray(_MIB))
        count = _fill(way.out, frame)
        assert count >= MAX_WAITING_BYTES // _MIB
        assert way.out.frames == count
        with pytest.raises(FrameError):
            way.out.send(data(bytes(MAX_FRAME_BYTES)), soon())
        reader, raised = _in_thread(lambda: [way.into.recv(soon()) for _ in range(count + 1)])
        way.out.send(data(b"last"), soon())
        reader.join()
        assert not raised
        with pytest.raises(LinkTimeout):
            way.into.recv(0.0)


def test_a_broken_connection_ends_the_outgoing_half() -> None:
    with one_way() as way:
        frame = memoryview(bytearray(_MIB))
        _fill(way.out, frame)
        thread, raised = _in_thread(lambda: way.out.await_release(soon()))
        for lane in way.into._lanes:
            lane.stream.shut()
            lane.stream.sock.close()  # with bytes unread: a reset
        thread.join()
        assert isinstance(raised[0], LinkEnded)
        with pytest.raises(LinkEnded, match="broke"):
            way.out.send(data(b"x"), soon())


def test_a_memory_error_in_the_writer_thread_blames_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_way() as way:
        fail = MemoryError("planted")
        written = Stream.write

        def write(stream: Stream, buffers: list[bytes | memoryview]) -> int:
            if threading.current_thread().name == "paceline-tcp":
                raise fail
            return written(stream, buffers)

        monkeypatch.setattr(Stream, "write", write)

        def fill() -> None:
            while True:  # until the kernel takes no more, and the thread is to go on
                way.out.send(data(b"x" * _MIB), soon())

        with pytest.raises(PacelineError, match="rank 0 raised MemoryError: planted") as raised:
            fill()
        assert raised.value.__cause__ is fail
