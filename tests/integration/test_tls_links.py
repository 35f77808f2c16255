"""Data connections in a cluster with TLS: encrypted, and for members alone."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from unit.links.tcp_pair import listening, on_loop

import paceline
from integration.mixed_world import Place, kinds_of, mixed_world, run_all
from paceline._base.waits import loop_thread
from paceline._group import Group
from paceline._links.fault import Fault
from paceline._links.grpc_door import Door
from paceline._links.tcp import TICKET_BYTES, TcpIncoming, TcpKind, client_context, connect
from paceline._links.tcp._tcp_wire import Hello, encode_hello
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR, MEMBER_NAME, Credentials
from paceline.errors import LinkUnavailable
from paceline.testing import coordinator
from support.certificates import CertificateFolder, make_folder

SECRET = b"weights that nobody else may read"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    return make_folder(tmp_path_factory.mktemp("tls") / "good")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    return make_folder(tmp_path_factory.mktemp("tls") / "foreign")


def exchange(group: Group) -> None:
    """An all_reduce of several frames, and a broadcast of words."""
    x = group.empty(1_500_001, np.float64)
    x[:] = np.arange(1_500_001) + group.rank
    expected = group.size * np.arange(1_500_001) + sum(range(group.size))
    assert np.array_equal(group.all_reduce(x), expected)
    words = np.frombuffer(SECRET * 1000, np.uint8)
    assert np.array_equal(group.broadcast(words), words)


@pytest.mark.parametrize("streams", [1, 3])
def test_members_with_tls_are_linked_by_tcp(good: CertificateFolder, streams: int) -> None:
    config = Config(links=("tcp",), tcp_streams=streams, failure_timeout=3.0, join_timeout=15.0)
    with coordinator(**good.server()) as address, ThreadPoolExecutor(3) as pool:
        sessions = list(
            pool.map(
                lambda _: paceline.join(address, credentials=good.credentials, config=config, min_workers=3), range(3)
            )
        )
        list(pool.map(lambda session: exchange(session.group), sessions))
        for session in sessions:
            mesh = session.group._core.mesh
            assert {link.kind for link in mesh._dialled} == {"tcp"}  # type: ignore[attr-defined]
        list(pool.map(lambda session: session.leave(), sessions))


class Tap:
    """Passes on what goes to a port, and keeps it.

    Attributes:
        port: instead of the other.
        heard: all that came, of all connections.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.heard = bytearray()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(10.0)

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                for source, target, keep in ((here, there, True), (there, here, False)):
                    self._threads.append(threading.Thread(target=self._pass, args=(source, target, keep)))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if keep:
                    self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        if not keep:  # the reader's side ends last
            source.close()
            target.close()


@contextmanager
def tapped() -> Iterator[tuple[list[Tap], Callable[[Door], None]]]:
    """The taps, and what puts one before each door's port for data."""
    with ExitStack() as stack:
        taps: list[Tap] = []

        def tap(door: Door) -> None:
            tcp = door.kinds.of(TcpKind).host
            assert tcp is not None
            taps.append(Tap(tcp.port))
            stack.callback(taps[-1].close)
            tcp.port = taps[-1].port

        yield taps, tap


@pytest.mark.parametrize("secure", [True, False])
def test_a_wiretap_reads_the_data_only_without_tls(good: CertificateFolder, secure: bool) -> None:
    credentials = good.credentials if secure else IN_THE_CLEAR
    with tapped() as (taps, tap):
        with mixed_world([Place(links=("tcp",), credentials=credentials)] * 2, prepare=tap) as world:
            run_all(world.groups, exchange)
            assert {kind for mesh in world.meshes for kind in kinds_of(mesh).values()} == {"tcp"}
        for each in taps:
            assert len(each.heard) > 2 << 20
            assert each.heard.startswith(b"\x16\x03") == secure  # a handshake record of TLS
        assert any(SECRET in each.heard for each in taps) != secure


def strangers(good: CertificateFolder, foreign: CertificateFolder) -> dict[str, Credentials]:
    """Who is no member."""
    cert, key = ((good.path / f"coordinator.{end}").read_bytes() for end in ("pem", "key"))
    whole, other = good.credentials, foreign.credentials
    return {
        "in the clear": IN_THE_CLEAR,
        "of another authority": other,
        "that believes us, and is of another authority": Credentials(whole.ca, other.cert, other.key),
        "with the coordinator's certificate": Credentials(whole.ca, cert, key),
    }


NAMES = [
    "in the clear",
    "of another authority",
    "that believes us, and is of another authority",
    "with the coordinator's certificate",
]


async def dial(port: int, ticket: bytes, credentials: Credentials) -> None:
    context = client_context(credentials)
    half = await connect(
        "127.0.0.1",
        port,
        ticket,
        1,
        Fault(1, 0, 0.0),
        "the reader",
        loop=asyncio.get_running_loop(),
        timeout=5.0,
        context=context,
        server_name=MEMBER_NAME,
    )
    half.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_stranger_with_a_ticket_gets_no_data_connection(
    good: CertificateFolder, foreign: CertificateFolder, name: str
) -> None:
    """And the ticket is still good for the member whose it is."""
    stranger = strangers(good, foreign)[name]
    ticket, come = secrets.token_bytes(TICKET_BYTES), list[TcpIncoming]()
    with listening(good.credentials) as host:
        on_loop(host.expect, ticket, 1, come.append, Fault(1, 1, 0.0), "the writer")
        with pytest.raises(LinkUnavailable, match="no data connection"):
            loop_thread().run(dial(host.port, ticket, stranger))
        assert not come
        loop_thread().run(dial(host.port, ticket, good.credentials))
        come.pop().close()


def test_a_plaintext_hello_is_not_answered(good: CertificateFolder) -> None:
    ticket, come = secrets.token_bytes(TICKET_BYTES), list[TcpIncoming]()
    with listening(good.credentials) as host:
        on_loop(host.expect, ticket, 1, come.append, Fault(1, 1, 0.0), "the writer")
        with socket.create_connection(("127.0.0.1", host.port), 5.0) as there:
            there.sendall(encode_hello(Hello(ticket, 0, 1)))
            said = b""
            with suppress(ConnectionResetError):
                while data := there.recv(100):
                    said += data
        assert said[:1] in (b"", b"\x15")  # nothing, or an alert of TLS
        assert not come


@pytest.mark.parametrize("name", NAMES)
def test_an_impostor_at_the_data_port_gets_no_frames(
    good: CertificateFolder, foreign: CertificateFolder, name: str
) -> None:
    """Somebody else listens where the door says that data goes: frames go by gRPC, which knows whom it talks to."""
    impostor = strangers(good, foreign)[name]
    with listening(impostor) as host:

        def lead_astray(door: Door) -> None:
            tcp = door.kinds.of(TcpKind).host
            assert tcp is not None
            tcp.port = host.port

        with mixed_world([Place("", credentials=good.credentials)] * 2, prepare=lead_astray) as world:
            run_all(world.groups, exchange)
            assert {kind for mesh in world.meshes for kind in kinds_of(mesh).values()} == {"grpc"}


def test_shared_memory_needs_no_certificates_but_the_control_channel_does(
    good: CertificateFolder, foreign: CertificateFolder
) -> None:
    with mixed_world([Place(credentials=good.credentials)] * 2) as world:
        run_all(world.groups, exchange)
        assert {kind for mesh in world.meshes for kind in kinds_of(mesh).values()} == {"shm"}
    places = [Place(credentials=good.credentials), Place(credentials=foreign.credentials)]
    with mixed_world(places, patience=0.3) as world, pytest.raises(paceline.PeerLost):
        run_all(world.groups, exchange)
