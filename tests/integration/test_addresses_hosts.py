"""Addresses between hosts: several interfaces, IPv6, names that come late, and loopback where it is of no use."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.netns import Host, network
from support.processes import Worker

pytestmark = pytest.mark.needs(what="root")

MEET = """
try:
    with paceline.join(timeout=20) as session:
        total = session.group.all_reduce(np.ones(1000))[0]
        emit("met", size=session.size, total=total, addresses=[member.address for member in session.members])
        session.barrier("all have told")
except paceline.PacelineError as error:
    emit_error(error)
"""


STORE = """
with paceline.join(timeout=20) as session:
    session.store.set("before", b"1")
    emit("stored")
    wait_for_go()
    session.store.set("after", b"2")
    emit("stored")
"""


WAITING = """
from concurrent.futures import ThreadPoolExecutor

def held():
    return {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}

with paceline.join(timeout=20) as session, ThreadPoolExecutor(2) as pool:
    session.store.set("before", b"1")
    waits = pool.submit(session.store.get, "late", timeout=60)
    time.sleep(1)
    emit("waits", **held())
    stored = pool.submit(session.store.set, "meanwhile", b"2")
    time.sleep(5)
    session.store.set("late", b"here")
    emit("stored")
    emit("got", value=waits.result().decode())
    stored.result()
    time.sleep(1)
    emit("ends", **held())
"""


@contextmanager
def _coordinator(host: Host, listen: str, *more: str) -> Iterator[None]:
    command = host.command([sys.executable, "-m", "paceline_server", "--listen", listen, *more])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert "listening" in process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _workers(*wanted: tuple[Host, dict[str, str]], code: str = MEET) -> Iterator[list[Worker]]:
    """One on each host, with these variables."""
    common = {"PACELINE_MIN_WORKERS": str(len(wanted)), "PACELINE_FLIGHT_DIR": "off"}
    started: list[Worker] = []
    try:
        for host, variables in wanted:
            more = {f"PACELINE_{name}": value for name, value in variables.items()}
            started.append(Worker(code, common | more, host))
        yield started
    finally:
        for worker in started:
            worker.close()


def _met(workers: list[Worker]) -> set[str]:
    """The hosts' addresses, once all have met."""
    told = [worker.expect("met") for worker in workers]
    assert {(event["size"], event["total"]) for event in told} == {(len(workers), len(workers))}
    assert len({tuple(event["addresses"]) for event in told}) == 1
    return {address.rpartition(":")[0] for address in told[0]["addresses"]}


def test_members_advertise_the_interface_that_reaches_the_coordinator() -> None:
    """The other one is the first by number, and has the default route."""
    with network(3) as net, _coordinator(net.hosts[0], f"{net.hosts[0].address}:7400"):
        a, b = net.hosts[1:]
        for host in (a, b):
            net.add_interface(host, "aaa0", "10.1.1.1/24", "10.1.1.2/24")
        at = {"COORDINATOR": f"{net.hosts[0].address}:7400"}
        with _workers((a, at), (b, at)) as workers:
            assert _met(workers) == {a.address, b.address}


@pytest.mark.alone
def test_members_use_the_coordinator_address_that_answers(tmp_path: Path) -> None:
    """Its name has an address on another network too, where nobody listens. No DNS server is asked, or waited for."""
    with network(3) as net, _coordinator(net.hosts[0], f"{net.hosts[0].address}:7400"):
        names = tmp_path / "hosts"
        names.write_text(f"10.1.1.2 coordinator\n{net.hosts[0].address} coordinator\n")
        a, b = net.hosts[1:]
        for host in (a, b):
            net.add_interface(host, "aaa0", "10.1.1.1/24", "10.1.1.2/24")
            host.etc["hosts"] = names
        at = {"COORDINATOR": "coordinator:7400"}
        start = time.monotonic()
        with _workers((a, at), (b, at)) as workers:
            assert _met(workers) == {a.address, b.address}
        assert time.monotonic() - start < 8


def test_host_names_that_look_like_grpc_schemes_work(tmp_path: Path) -> None:
    """The coordinator's, and one that a worker advertises."""
    with network(3) as net, _coordinator(net.hosts[0], f"{net.hosts[0].address}:7400"):
        names = tmp_path / "hosts"
        a, b = net.hosts[1:]
        names.write_text(f"{net.hosts[0].address} unix\n{a.address} dns\n")
        for host in (a, b):
            host.etc["hosts"] = names
        at = {"COORDINATOR": "unix:7400"}
        with _workers((a, {**at, "ADVERTISE": "dns"}), (b, at)) as workers:
            assert _met(workers) == {"dns", b.address}


def test_members_on_different_hosts_meet_over_ipv6() -> None:
    with network(3) as net, _coordinator(net.hosts[0], f"[{net.hosts[0].address6}]:7400"):
        a, b = net.hosts[1:]
        at = {"COORDINATOR": f"[{net.hosts[0].address6}]:7400"}
        with _workers((a, at), (b, at)) as workers:
            assert _met(workers) == {f"[{a.address6}]", f"[{b.address6}]"}


def test_peers_connect_to_the_advertised_address(tmp_path: Path) -> None:
    """An IPv6 address in a job that meets over IPv4, an address with a port, and a name that appears a moment later."""
    with network(4) as net, _coordinator(net.hosts[0], f"{net.hosts[0].address}:7400"):
        names = tmp_path / "hosts"
        names.write_text("127.0.0.1 localhost\n")
        a, b, c = net.hosts[1:]
        for host in net.hosts:
            host.etc["hosts"] = names
        at = {"COORDINATOR": f"{net.hosts[0].address}:7400"}
        with _workers(
            (a, {**at, "ADVERTISE": f"[{a.address6}]"}),
            (b, {**at, "ADVERTISE": f"{b.address}:7999"}),
            (c, {**at, "ADVERTISE": "node-c"}),
        ) as workers:
            _wait_for(workers[2], "'node-c' (`advertise`), but the name 'node-c' does not resolve")
            names.write_text(f"{c.address} node-c\n")
            assert _met(workers) == {f"[{a.address6}]", b.address, "node-c"}


@pytest.mark.alone
def test_join_warns_and_waits_until_the_coordinators_name_resolves(tmp_path: Path) -> None:
    """As where containers start side by side: there is no such name before there is such a container."""
    with network(2) as net:
        there, here = net.hosts
        names = tmp_path / "hosts"
        names.write_text("127.0.0.1 localhost\n")
        here.etc["hosts"] = names
        with _workers((here, {"COORDINATOR": "coordinator:7400"})) as (worker,):
            _wait_for(
                worker, "cannot reach the coordinator at coordinator:7400: the name 'coordinator' does not resolve"
            )
            with _coordinator(there, f"{there.address}:7400"):
                names.write_text(f"{there.address} coordinator\n")
                named = time.monotonic()
                assert _met([worker]) == {here.address}
                assert time.monotonic() - named < 3


def test_a_member_reconnects_after_the_coordinator_changes_address(tmp_path: Path) -> None:
    """Its name follows it a moment later, as in any name service: nobody is to be taken for lost for that."""
    with network(3) as net:
        first, second, here = net.hosts
        names = tmp_path / "hosts"
        names.write_text(f"{first.address} coordinator\n")
        here.etc["hosts"] = names
        state = ("--state", str(tmp_path / "state.db"))
        with _workers((here, {"COORDINATOR": "coordinator:7400"}), code=STORE) as (worker,):
            with _coordinator(first, f"{first.address}:7400", *state):
                worker.expect("stored")
            with _coordinator(second, f"{second.address}:7400", *state):
                time.sleep(1)  # the name service is late; members have failure_timeout, 3 s, to come back
                names.write_text(f"{second.address} coordinator\n")
                worker.go()
                worker.expect("stored")


@pytest.mark.alone
@pytest.mark.parametrize(
    "token",
    [pytest.param(None, marks=pytest.mark.exhaustive), "0123456789abcdef0123456789abcdef"],
    ids=["", "with a token"],
)
def test_a_member_reconnects_quickly_after_a_long_name_outage(token: str | None, tmp_path: Path) -> None:
    """It comes back at another address. Whoever waits for an answer of its store gets it, and no channel is left."""
    with network(3) as net:
        first, second, here = net.hosts
        names = tmp_path / "hosts"
        names.write_text(f"{first.address} coordinator\n")
        here.etc["hosts"] = names
        options = ["--state", str(tmp_path / "state.db")]
        at = {"COORDINATOR": "coordinator:7400"}
        if token is not None:
            (tmp_path / "tokens").touch(0o600)
            (tmp_path / "tokens").write_text(f"{token}\n")
            options += ["--token-file", str(tmp_path / "tokens")]
            at["TOKEN"] = token
        with _workers((here, at), code=WAITING) as (worker,):
            with _coordinator(first, f"{first.address}:7400", *options):
                before = worker.expect("waits")
            names.write_text("127.0.0.1 localhost\n")
            time.sleep(15)
            with _coordinator(second, f"{second.address}:7400", *options):
                names.write_text(f"{second.address} coordinator\n")
                named = time.monotonic()
                back = worker.expect("stored")["at"] - named
                got = worker.expect("got")
                assert got["value"] == "here"
                assert back < 2
                after = worker.expect("ends")
                assert after["files"] <= before["files"] + 2, worker.stderr
                assert after["threads"] <= before["threads"] + 2, worker.stderr
                assert worker.wait() == 0, worker.stderr


def test_loopback_and_remote_workers_in_one_job_raise_settings_mismatch() -> None:
    with network(2) as net, _coordinator(net.hosts[0], "0.0.0.0:7400"):
        here, there = net.hosts
        with _workers(
            (here, {"COORDINATOR": "127.0.0.1:7400"}), (there, {"COORDINATOR": f"{here.address}:7400"})
        ) as workers:
            refused = _first_to_end(workers).expect("error")
        assert refused["type"] == "SettingsMismatch"
        for word in (here.name, there.name, "127.0.0.1:", f"{there.address}:", "PACELINE_ADVERTISE"):
            assert word in refused["text"]


def _first_to_end(workers: list[Worker]) -> Worker:
    deadline = time.monotonic() + 20
    while True:
        for worker in workers:
            if worker.process.poll() is not None:
                return worker
        assert time.monotonic() < deadline, "nobody ended"
        time.sleep(0.01)


def _wait_for(worker: Worker, text: str) -> None:
    """Waits until it complains of that."""
    deadline = time.monotonic() + 20
    while text not in worker.stderr:
        assert time.monotonic() < deadline, worker.stderr
        time.sleep(0.01)
