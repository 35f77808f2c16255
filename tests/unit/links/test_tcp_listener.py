"""The port for data, and whoever comes to it: peers with a ticket, strangers, and those who say nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import select
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from unit.links.halves_link import soon
from unit.links.tcp_pair import call_at, data, listening, on_loop, one_way, open_half

from paceline._base.waits import loop_thread
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.fault import Fault
from paceline._links.tcp import TICKET_BYTES, TcpHost, TcpIncoming, TcpLimits, client_context, connect, server_context
from paceline._links.tcp._tcp_wire import ACCEPTED, MAX_STREAMS, Hello, encode_hello
from paceline.credentials import MEMBER_NAME, Credentials
from paceline.errors import ForkedSession, LinkUnavailable
from support.certificates import CertificateFolder, make_folder

_FAULT = Fault(1, 0, 0.0)
_PATIENT = TcpLimits(ticket_s=1000.0, hello_s=1000.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    return make_folder(tmp_path_factory.mktemp("tls") / "certs")


def _expect(host: TcpHost, streams: int = 1) -> tuple[bytes, list[TcpIncoming]]:
    """A ticket, and where the half that comes with it goes."""
    ticket, come = secrets.token_bytes(TICKET_BYTES), list[TcpIncoming]()
    on_loop(host.expect, ticket, streams, come.append, _FAULT, "the writer")
    return ticket, come


def _ended(sock: socket.socket) -> bool:
    """Waits until the other side hangs up."""
    return _some(sock) == b""


def _some(sock: socket.socket) -> bytes:
    """What has come; nothing at the end."""
    try:
        return sock.recv(100)
    except ConnectionResetError:
        return b""


def _connect(port: int, ticket: bytes, streams: int = 1, **settings: Any) -> None:
    async def dial() -> None:
        loop = asyncio.get_running_loop()
        settings.setdefault("timeout", 5.0)
        (await connect("127.0.0.1", port, ticket, streams, _FAULT, "rank 1 (b)", loop=loop, **settings)).close()

    loop_thread().run(dial())


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        bytes(1000),
        encode_hello(Hello(bytes(TICKET_BYTES), 0, 1)),
        encode_hello(Hello(bytes(TICKET_BYTES), 0, 255)),
    ],
    ids=["http", "zeros", "a wrong ticket", "too many streams"],
)
def test_an_invalid_hello_is_disconnected_without_an_answer(words: bytes) -> None:
    with listening() as host, call_at(host, words) as sock:
        assert _ended(sock)


def test_a_ticket_admits_each_of_its_streams_once() -> None:
    with listening() as host:
        ticket, come = _expect(host, 2)
        with call_at(host, Hello(ticket, 0, 3)) as three:
            assert _ended(three)
        # Of two callers with the same stream the host takes one; what they send may be read in either order.
        with call_at(host, Hello(ticket, 0, 2)) as one, call_at(host, Hello(ticket, 0, 2)) as another:
            (refused,), _, _ = select.select([one, another], [], [], 10.0)
            assert _ended(refused)
            assert not come
            first = another if refused is one else one
            with call_at(host, Hello(ticket, 1, 2)) as second:
                assert first.recv(1) == second.recv(1) == ACCEPTED
                (half,) = come
                with call_at(host, Hello(ticket, 0, 2)) as late:
                    assert _ended(late)
                half.close()


def test_expect_raises_value_error_for_duplicate_or_invalid_tickets() -> None:
    with listening() as host:
        ticket, _ = _expect(host)
        for wrong, streams in ((ticket, 1), (b"short", 1), (bytes(TICKET_BYTES), 0), (bytes(TICKET_BYTES), 17)):
            with pytest.raises(ValueError, match="ticket"):
                on_loop(host.expect, wrong, streams, print, _FAULT, "b")


def test_incomplete_hellos_and_missing_streams_time_out() -> None:
    with listening(limits=TcpLimits(ticket_s=0.1)) as host:
        ticket, come = _expect(host, 2)
        with call_at(host, b"plTCP") as half, call_at(host, Hello(ticket, 0, 2)) as lonely:
            assert _ended(half)
            assert _ended(lonely)
        assert not come
        assert not host._expected


def test_a_forgotten_ticket_is_refused() -> None:
    with listening() as host:
        ticket, _ = _expect(host, 2)
        with call_at(host, Hello(ticket, 0, 2)) as waits:
            with call_at(host, b"nonsense" * 4) as other:  # whoever came before it has been seen to
                assert _ended(other)
            on_loop(host.forget, ticket)
            assert _ended(waits)
        with pytest.raises(LinkUnavailable, match="not accepted"):
            _connect(host.port, ticket, 2)


def test_a_silent_stranger_times_out_sooner_than_an_incomplete_half() -> None:
    with listening(limits=_PATIENT) as host:
        ticket, come = _expect(host, 2)
        with call_at(host, Hello(ticket, 0, 2)) as first:
            with call_at(host, b"nonsense" * 4) as other:  # whoever came before it has been seen to
                assert _ended(other)
            host.limits = replace(_PATIENT, hello_s=0.1)
            with call_at(host) as silent:
                assert _ended(silent)
            host.limits = _PATIENT
            with call_at(host, Hello(ticket, 1, 2)) as second:
                assert first.recv(1) == second.recv(1) == ACCEPTED
                come[0].close()


def test_the_oldest_stranger_is_closed_for_a_waiting_connection() -> None:
    with listening(limits=replace(_PATIENT, max_strangers=3, hurried_s=0.1)) as host:
        ticket, come = _expect(host)
        silent = [call_at(host) for _ in range(3)]
        with call_at(host, Hello(ticket, 0, 1)) as good:
            assert good.recv(1) == ACCEPTED
            come[0].close()
        assert _ended(silent[0])
        for sock in silent[1:]:  # nobody waits for their places
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
        for sock in silent:
            sock.close()


def test_connections_above_max_strangers_wait_until_one_closes() -> None:
    with listening(limits=replace(_PATIENT, max_strangers=3, hurried_s=1000.0)) as host:
        ticket, come = _expect(host)
        silent = [call_at(host) for _ in range(3)]
        with call_at(host, Hello(ticket, 0, 1)) as good:
            good.settimeout(0.1)
            with pytest.raises(TimeoutError):
                good.recv(1)
            assert not come
            silent.pop().close()
            good.settimeout(10.0)
            assert good.recv(1) == ACCEPTED
            come[0].close()
        on_loop(host.close)
        for sock in silent:
            assert _ended(sock)
            sock.close()


def test_close_disconnects_a_connection_that_was_just_accepted() -> None:
    """Without a warning of a socket that nobody closes."""
    with listening() as host:
        on_loop(host._pause)
        with call_at(host) as sock:
            on_loop(lambda: (host._accept(), host.close()))
            assert _ended(sock)


def test_the_host_accepts_again_after_running_out_of_descriptors() -> None:
    with listening(limits=TcpLimits(recovery_s=0.01)) as host:
        ticket, come = _expect(host)
        real, calls = host._listening, []

        class Exhausted:
            def accept(self) -> Any:
                calls.append(1)
                if len(calls) == 1:
                    raise OSError(24, "Too many open files")
                assert real is not None
                return real.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        host._listening = Exhausted()  # type: ignore[assignment]
        with call_at(host, Hello(ticket, 0, 1)) as sock:
            assert sock.recv(1) == ACCEPTED
        come[0].close()
        assert len(calls) > 1


def test_a_failed_connection_raises_an_error_with_its_reason() -> None:
    with listening() as host:
        port = host.port
        with pytest.raises(LinkUnavailable, match=rf"no data connection to rank 1 \(b\) at 127.0.0.1:{port}: .*accept"):
            _connect(port, bytes(TICKET_BYTES))
        ticket, _ = _expect(host, 2)
        with pytest.raises(LinkUnavailable, match="accept"):
            _connect(port, ticket, 3)
    with pytest.raises(LinkUnavailable, match="refused"):
        _connect(port, bytes(TICKET_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(LinkUnavailable, match=r"no answer in 0.1 s"):
        _connect(deaf.getsockname()[1], bytes(TICKET_BYTES), timeout=0.1)
    with pytest.raises(ValueError, match="17 streams"):
        _connect(port, bytes(TICKET_BYTES), MAX_STREAMS + 1)


def test_listening_on_a_taken_port_raises_link_unavailable() -> None:
    with listening() as host:
        other = TcpHost(loop_thread().loop, None)
        with pytest.raises(LinkUnavailable, match=f"cannot listen for data on 127.0.0.1:{host.port}"):
            loop_thread().run(other.start("127.0.0.1", host.port))


@pytest.mark.parametrize("where", ["", "::", "0.0.0.0", "localhost"])
def test_the_host_listens_on_the_given_address(where: str) -> None:
    host = TcpHost(loop_thread().loop, None)
    port = loop_thread().run(host.start(where))
    try:
        ticket, come = _expect(host)
        with socket.create_connection(("localhost", port)) as sock:
            sock.sendall(encode_hello(Hello(ticket, 0, 1)))
            assert sock.recv(1) == ACCEPTED
        come[0].close()
    finally:
        on_loop(host.close)


def test_tls_admits_only_member_certificates(folder: CertificateFolder, tmp_path: Path) -> None:
    members = folder.credentials
    foreign = make_folder(tmp_path / "foreign").credentials
    with listening(members) as host:
        ticket, come = _expect(host)
        for stranger in (foreign, folder.authority_only, Credentials(members.ca, foreign.cert, foreign.key)):
            with pytest.raises(LinkUnavailable):
                _connect(host.port, ticket, context=client_context(stranger), server_name=MEMBER_NAME)
        with pytest.raises(LinkUnavailable, match="match"):
            _connect(host.port, ticket, context=client_context(members), server_name="somebody.else")
        with call_at(host, Hello(ticket, 0, 1)) as clear:
            assert ACCEPTED not in iter(partial(_some, clear), b"")  # an alert, or nothing
        with pytest.raises(ValueError, match="None"):
            _connect(host.port, ticket, context=client_context(members))
        assert not come
        _connect(host.port, ticket, context=client_context(members), server_name=MEMBER_NAME)
        come[0].close()
    with listening() as host:
        ticket, come = _expect(host)
        with pytest.raises(LinkUnavailable):
            _connect(host.port, ticket, context=client_context(members), server_name=MEMBER_NAME)
        assert not come


def test_tls_contexts_always_verify_certificates(folder: CertificateFolder) -> None:
    assert server_context(Credentials()) is client_context(Credentials()) is None
    with pytest.raises(ValueError, match="certificate"):
        server_context(folder.authority_only)
    for context in (server_context(folder.credentials), client_context(folder.credentials)):
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    client = client_context(folder.credentials)
    assert client is not None
    assert client.check_hostname


def _descriptors() -> int:
    gc.collect()  # what other tests have left
    _join_writers()
    on_loop(lambda: None)  # what is closed on the loop is closed
    return len(os.listdir("/proc/self/fd"))


def _join_writers() -> None:
    for thread in [thread for thread in threading.enumerate() if thread.name == "paceline-tcp"]:
        thread.join(10.0)  # it has been told to end, and holds descriptors until then
        assert not thread.is_alive()


def _fill(send: Callable[[], None]) -> None:
    try:
        while True:
            send()
    except LinkTimeout:
        return


@pytest.mark.slow
def test_closed_halves_leak_no_descriptor(folder: CertificateFolder) -> None:
    big = memoryview(bytes(1 << 20))
    for credentials, count in ((Credentials(), 300), (folder.credentials, 20)):
        context = client_context(credentials)
        with listening(credentials) as host:
            before = 0
            for number in range(count + 1):
                if number == 1:  # the first may have imported something
                    before = _descriptors()
                out, into = open_half(host, host.port, 1 + number % 4, (_FAULT, _FAULT), context=context)
                if number % 2:
                    into.on_readable(lambda: None)
                if number % 10 == 1:  # so that it has a thread, with something to do
                    _fill(lambda out=out: out.lend(data(big), 0.0))  # type: ignore[misc]
                for half in (out, into):
                    half.close()
                    half.close()
            assert _descriptors() <= before
    _join_writers()


def test_a_forked_child_neither_uses_a_half_nor_keeps_it_open() -> None:
    with one_way(2) as way:
        hear, tell = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(tell)
                for call in (lambda: way.out.send(data(b"x"), soon()), lambda: way.into.recv(soon())):
                    try:
                        call()
                    except ForkedSession:
                        continue
                    os._exit(1)
                os.read(hear, 1)  # until the parent has seen the end
            finally:
                os._exit(0)
        os.close(hear)
        way.out._streams[0].sock.send(b"\xa7")  # the beginning of a frame
        way.out.close()
        assert select.select([way.into._lanes[0].stream.fd], [], [], 10.0)[0]
        with pytest.raises(LinkEnded, match="in the middle"):
            way.into.recv(soon())
        os.close(tell)
        assert os.waitpid(child, 0)[1] == 0
