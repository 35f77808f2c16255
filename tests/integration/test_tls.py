"""TLS between a coordinator, workers and their doors: what works, and how each thing that can be wrong is named."""

from __future__ import annotations

import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import paceline
from paceline._base.rpc import CHANNEL_OPTIONS, aio, grpc
from paceline._base.waits import loop_thread
from paceline._elastic.peer_calls import out_of_reach
from paceline._links.base import Peer
from paceline._links.grpc_door import Door
from paceline._links.grpc_knock import Knocker
from paceline.cli.app import app
from paceline.cli.health import trouble_at
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR, Credentials
from paceline.testing import coordinator
from paceline_server import ServerSettings
from paceline_server.security.tls import CertificateKeeper, TlsPaths
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.peer_pb2_grpc import PeerServiceStub
from support.certificates import CertificateFolder, make_folder, renew
from support.command import command
from support.elastic.cluster import cluster
from support.hanging import hanging
from support.ports import free_port

QUICK = Config(failure_timeout=1.0, join_timeout=10.0)

SOON = 20.0
"""Seconds in which a final refusal comes; `join` would wait for 30 below."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    return make_folder(tmp_path_factory.mktemp("tls") / "good")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    return make_folder(tmp_path_factory.mktemp("tls") / "foreign")


def join(address: str, credentials: Credentials, **arguments: Any) -> paceline.Session:
    return paceline.join(address, credentials=credentials, config=QUICK, **arguments)


@contextmanager
def members(address: str, count: int, credentials: Credentials) -> Iterator[list[paceline.Session]]:
    """A view of so many, by rank; they leave at the end."""
    with ThreadPoolExecutor(count) as pool:
        sessions = list(pool.map(lambda _: join(address, credentials, min_workers=count), range(count)))
        try:
            yield sorted(sessions, key=lambda session: session.rank)
        finally:
            list(pool.map(lambda session: session.leave(), sessions))


def total(sessions: list[paceline.Session]) -> list[float]:
    """What an all_reduce of several frames gives on each."""

    def reduce(session: paceline.Session) -> float:
        return float(session.group.all_reduce(np.full(1_500_001, session.rank + 1.0))[-1])

    with ThreadPoolExecutor(len(sessions)) as pool:
        return list(pool.map(reduce, sessions))


def test_members_meet_and_communicate_over_tls(good: CertificateFolder) -> None:
    with coordinator(**good.server()) as address, members(address, 3, good.credentials) as sessions:
        assert total(sessions) == [6.0] * 3
        sessions[0].store.set("key", b"value")
        assert sessions[2].store.get("key") == b"value"


@pytest.mark.parametrize("listen", ["localhost:0", "[::1]:0"])
def test_join_over_tls_works_by_name_and_by_ipv6(good: CertificateFolder, listen: str) -> None:
    with coordinator(listen=listen, **good.server(mutual=False)) as address:
        assert address.startswith(listen[:-1])
        with join(address, good.credentials) as session:
            assert session.size == 1


@pytest.mark.parametrize("mutual", [True, False])
@pytest.mark.parametrize(
    ("now", "words"), [(0.0, None), (2 * 86_400.0, "expired on "), (-2 * 86_400.0, "is not valid before ")]
)
def test_an_expired_or_future_server_certificate_logs_a_warning(
    good: CertificateFolder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    mutual: bool,
    now: float,
    words: str | None,
) -> None:
    settings = good.server(mutual=mutual)
    today = time.time()
    monkeypatch.setattr("time.time", lambda: today + now)
    paths = TlsPaths.of(ServerSettings(**settings))
    assert paths is not None
    paths.read()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (words is not None)
    for each in said:
        assert each.startswith(f"the certificate {settings['tls_cert']} {words}")
        assert str(datetime.fromtimestamp(today, UTC).year) in each


def served(address: str, authority: Path) -> bytes:
    """The certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection((host, int(port)), SOON) as plain,
        context.wrap_socket(plain, server_hostname=host) as there,
    ):
        return there.getpeercert(binary_form=True) or b""


def test_a_renewed_certificate_is_served_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """New connections get it, those that are there stay; a slip in the files leaves the last one in force."""
    monkeypatch.setattr(CertificateKeeper, "open", partial(CertificateKeeper.open, look_s=0.01))
    folder = make_folder(tmp_path / "tls")
    ca, cert, key = (folder.path / name for name in ("ca.pem", "coordinator.pem", "coordinator.key"))

    def is_served(data: bytes) -> bool:
        return served(address, ca) == ssl.PEM_cert_to_DER_cert(data.decode())

    def wait_for(happened: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON
        while not happened():
            assert time.monotonic() < end, caplog.text
            time.sleep(0.01)

    with coordinator(**folder.server(mutual=False)) as address, join(address, folder.credentials) as session:
        first = cert.read_bytes()
        assert is_served(first)
        part = key.with_suffix(".part")
        part.touch(0o600)
        part.write_bytes(b"nothing")
        part.replace(key)
        wait_for(lambda: "the last certificate stays in force" in caplog.text)
        assert all(is_served(first) for _ in range(10))
        assert caplog.text.count("the last certificate stays in force") == 1  # though it was looked at again and again
        renew(folder, "coordinator", days=0.5)
        second = cert.read_bytes()
        wait_for(lambda: is_served(second))
        session.store.set("key", b"value")
        with join(address, folder.credentials, job="another"):
            pass


def test_hanging_certificate_files_delay_no_join_but_time_out_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A look that hangs holds nobody up; at the start it has an end, and names the files."""
    monkeypatch.setattr(CertificateKeeper, "open", partial(CertificateKeeper.open, look_s=0.01, first_s=0.2))
    folder = make_folder(tmp_path / "tls")
    cert = folder.path / "coordinator.pem"
    with coordinator(**folder.server()) as address, hanging(cert), join(address, folder.credentials):
        pass
    with hanging(cert):
        began = time.monotonic()
        with (
            pytest.raises(ValueError, match=f"cannot read {cert}, .* within 0.2 s"),
            coordinator(**folder.server()),
        ):
            pass
        assert time.monotonic() - began < SOON


def test_health_needs_the_certificate_authority(
    good: CertificateFolder, foreign: CertificateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator(**good.server(mutual=False)) as address:
        assert trouble_at(address, timeout=0.5)
        monkeypatch.setenv("PACELINE_TLS_CA", str(foreign.path / "ca.pem"))
        assert trouble_at(address, timeout=0.5)
        monkeypatch.setenv("PACELINE_TLS_CA", str(good.path / "ca.pem"))
        assert not trouble_at(address)


def fault(address: str, credentials: Credentials) -> str:
    """What `join` says, soon."""
    start = time.monotonic()
    with pytest.raises(paceline.TlsFailed, match=f"no connection with the coordinator at {address}: ") as caught:
        paceline.join(address, credentials=credentials, timeout=30.0)
    assert time.monotonic() - start < SOON
    return str(caught.value)


def test_a_certificate_of_another_authority_is_named(good: CertificateFolder, foreign: CertificateFolder) -> None:
    with coordinator(**foreign.server()) as address:
        assert "its certificate is from another authority than that of PACELINE_TLS_CA" in fault(
            address, good.credentials
        )


def test_an_expired_certificate_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tls")
    renew(folder, "coordinator", days=-1.0)
    with coordinator(**folder.server(mutual=False)) as address:
        assert "its certificate has expired" in fault(address, folder.credentials)


def test_a_certificate_for_another_name_is_named(tmp_path: Path) -> None:
    elsewhere = make_folder(tmp_path / "elsewhere", hosts=["train.example", "10.0.0.1"])
    with coordinator(**elsewhere.server()) as address:
        said = fault(address, elsewhere.credentials)
    assert said.endswith("its certificate is not for 127.0.0.1")


def test_a_self_signed_coordinator_certificate_is_refused(good: CertificateFolder, tmp_path: Path) -> None:
    alone = make_folder(tmp_path / "alone", self_made=True)
    server = {"tls_cert": alone.path / "ca.pem", "tls_key": alone.path / "coordinator.key"}
    with pytest.raises(ValueError, match="are not a certificate and its key"), coordinator(**server):
        pass
    with coordinator(**alone.server()) as address:
        assert "another authority" in fault(address, good.credentials)


def test_a_worker_without_tls_reports_a_coordinator_with_tls(good: CertificateFolder) -> None:
    for mutual in (True, False):
        with coordinator(**good.server(mutual=mutual)) as address:
            said = fault(address, IN_THE_CLEAR)
            assert "it uses TLS, but this process does not: set PACELINE_TLS_CA" in said


def test_a_worker_with_tls_reports_a_coordinator_without_tls(good: CertificateFolder) -> None:
    with coordinator() as address:
        assert "it does not use TLS, but this process does: PACELINE_TLS_CA is set" in fault(address, good.credentials)


def test_a_worker_reports_that_its_certificate_is_not_accepted(
    good: CertificateFolder, foreign: CertificateFolder
) -> None:
    settings = {**good.server(), "tls_ca": foreign.path / "ca.pem"}
    with coordinator(**settings) as address:
        assert "it does not accept our certificate (PACELINE_TLS_CERT)" in fault(address, good.credentials)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"days": -1.0}, "has expired"),
        ({"member": ["localhost"]}, "is not for member.paceline"),
        ({"self_made": True}, "is from another authority than that of PACELINE_TLS_CA"),
    ],
)
def test_an_invalid_worker_certificate_raises_value_error(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    credentials = make_folder(tmp_path / "tls", **wrong).credentials
    with pytest.raises(ValueError, match=rf"this worker's own certificate \(PACELINE_TLS_CERT\) {words}"):
        paceline.join("127.0.0.1:1", credentials=credentials)


def test_a_coordinators_certificate_is_refused_for_a_worker(good: CertificateFolder) -> None:
    cert, key = ((good.path / f"coordinator.{end}").read_bytes() for end in ("pem", "key"))
    with pytest.raises(ValueError, match="own certificate"):
        Credentials(good.credentials.ca, cert, key).for_worker()


def test_a_worker_without_a_certificate_raises_value_error(good: CertificateFolder) -> None:
    with pytest.raises(ValueError, match="connections from other members would not be encrypted"):
        paceline.join("127.0.0.1:1", credentials=good.authority_only)


def test_a_late_coordinator_with_a_foreign_certificate_fails_join(
    good: CertificateFolder, foreign: CertificateFolder
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(fault, address, good.credentials)
        time.sleep(0.3)  # it has tried in vain
        with coordinator(listen=address, **foreign.server()):
            assert "another authority" in said.result()


def test_an_absent_coordinator_is_unreachable_and_not_a_tls_failure(good: CertificateFolder) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(paceline.CoordinatorUnreachable, match="no coordinator answers") as caught:
        paceline.join(address, credentials=good.credentials, timeout=0.5)
    assert not isinstance(caught.value, paceline.TlsFailed)


def knock(address: str, credentials: Credentials) -> aio.AioRpcError:
    """How a door answers somebody who has no business there."""

    async def call() -> aio.AioRpcError:
        async with credentials.member_channel(address, CHANNEL_OPTIONS) as channel:
            try:
                await PeerServiceStub(channel).Hello(peer_pb2.HelloRequest(), timeout=5.0)
            except aio.AioRpcError as error:
                return error
        raise AssertionError("the door has opened")

    return loop_thread().run(call())


def test_a_members_door_refuses_handshakes_of_strangers(good: CertificateFolder, foreign: CertificateFolder) -> None:
    whole, other = good.credentials, foreign.credentials
    with coordinator(**good.server()) as address, members(address, 2, whole) as sessions:
        door = sessions[0].members[1].address
        strangers = (IN_THE_CLEAR, good.authority_only, other, Credentials(whole.ca, other.cert, other.key))
        for stranger in strangers:
            error = knock(door, stranger)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "belongs to this job" not in (error.details() or "")  # the handshake has failed
        assert "the caller does not prove that it belongs to this job" in (knock(door, whole).details() or "")
        assert total(sessions) == [3.0] * 2


@pytest.mark.parametrize("kind", ["foreign", "coordinator", "in the clear"])
def test_a_door_with_a_wrong_certificate_is_reported_as_unreachable(
    good: CertificateFolder, foreign: CertificateFolder, kind: str
) -> None:
    """Another authority's certificate, or one of the right authority for another role, or none."""
    cert, key = ((good.path / f"coordinator.{end}").read_bytes() for end in ("pem", "key"))
    whole = good.credentials
    impostor = {
        "foreign": foreign.credentials,
        "coordinator": Credentials(whole.ca, cert, key),
        "in the clear": IN_THE_CLEAR,
    }[kind]
    door = Door("job", impostor)
    thread = loop_thread()
    port = thread.run(door.start("127.0.0.1", 0))
    try:
        peer = Peer(0, "m", "host-a", f"127.0.0.1:{port}", 1)
        start = time.monotonic()
        (trouble,) = thread.run(out_of_reach("job", [peer], Knocker("me", "127.0.0.1:1"), 0.5, whole))
        assert time.monotonic() - start < SOON
        assert trouble.startswith("rank 0 (host-a, pid 1) at 127.0.0.1")
    finally:
        thread.run(door.close())


@pytest.mark.slow
def test_run_and_status_use_tls_from_the_environment(good: CertificateFolder, foreign: CertificateFolder) -> None:
    """The launcher's embedded coordinator has what its workers have; status needs the authority alone."""
    hello = "import numpy, paceline\nwith paceline.join() as s: print(int(s.group.all_reduce(numpy.int64(1))))"
    script = good.path / "hello.py"
    script.write_text(hello)
    with command("run", "-n", "2", str(script), **good.environment) as run:
        assert run.wait() == 0, str(run)
        assert sorted(run.stdout.split("\n")) == ["", "[0] 2", "[1] 2"]
    with coordinator(**good.server(mutual=False)) as address:
        only = {"PACELINE_TLS_CA": good.environment["PACELINE_TLS_CA"]}
        with command("status", "--coordinator", address, **only) as status:
            assert status.wait() == 0, str(status)
    refused = CliRunner().invoke(app, ["run", str(script)], env=only)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("paceline: PACELINE_TLS_CA is set, but PACELINE_TLS_CERT")


@pytest.mark.slow
def test_a_newcomer_receives_the_state_over_tls(good: CertificateFolder, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=3, total=2_000, pace=0.01, certificates=good) as job:
        job.start(2)
        job.wait_for_step(2)
        fault(job.address, IN_THE_CLEAR)
        (newcomer,) = job.start(1)
        job.wait_until(lambda: bool(newcomer.of("applied")), "the newcomer trains")
        assert newcomer.of("attempt")[0]["step"] > 2
        assert any(event["size"] == 3 for event in newcomer.of("view"))
        for trainer in job.trainers:
            trainer.signal(signal.SIGTERM)
        assert set(job.wait().values()) == {0}, str(job)
    assert "andshake" not in (tmp_path / "coordinator.log").read_text()  # strangers do not fill the log
