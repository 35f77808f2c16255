"""A connection for data that is cut alone, while the rest of the network is whole: a firewall has forgotten it."""

from __future__ import annotations

import subprocess

import pytest

from integration.host_coordinator import coordinator_on
from support.netns import Host, network
from support.processes import Worker

pytestmark = [pytest.mark.alone, pytest.mark.needs(what="root")]

CODE = """
sys.argv = ["", "SIZE"]
with paceline.join(timeout=20) as session:
    group, x = session.group, np.ones(int(sys.argv[1]), np.uint8)
    group.all_reduce(x)
    from paceline._links.base import Purpose
    from paceline._links.tcp import TcpKind
    kind = group._core.mesh.link(1 - session.rank, Purpose.COLLECTIVE).kind
    emit("linked", kind=kind, port=session._connection.door.kinds.of(TcpKind).host.port)
    wait_for_go()
    started = time.monotonic()
    try:
        while True:  # the first ones may get through: it is the answers that are lost
            group.all_reduce(x, timeout=20)
    except paceline.PacelineError as error:
        emit("failed", seconds=time.monotonic() - started, type=type(error).__name__)
"""


def _drop_answers(host: Host, port: int) -> None:
    """What the host sends from that port is lost from now on."""
    for words in (
        ["rule", "add", "ipproto", "tcp", "sport", str(port), "table", "100"],
        ["route", "replace", "blackhole", "default", "table", "100"],
    ):
        subprocess.run(["ip", "-n", host.name, *words], check=True, timeout=10)


@pytest.mark.parametrize("size", [1 << 10, 4 << 20])
def test_a_cut_data_connection_raises_peer_lost_soon_after_timeout(size: int) -> None:
    """What is small is with the kernel at once, and both only wait; of what is large something is still to be sent."""
    with network(2) as net, coordinator_on(net.hosts[0]) as address:
        variables = {
            "PACELINE_COORDINATOR": address,
            "PACELINE_MIN_WORKERS": "2",
            "PACELINE_LINKS": "tcp",
            "PACELINE_FLIGHT_DIR": "off",
            "PACELINE_FAILURE_TIMEOUT": "1.5",
        }
        started = [Worker(CODE.replace("SIZE", str(size)), variables, host) for host in net.hosts]
        try:
            linked = [worker.expect("linked") for worker in started]
            assert [each["kind"] for each in linked] == ["tcp", "tcp"]
            for host, each in zip(net.hosts, linked, strict=True):
                _drop_answers(host, each["port"])
            for worker in started:
                worker.go()
            for worker in started:
                failed = worker.expect("failed", timeout=30)
                assert failed["type"] == "PeerLost"
                assert failed["seconds"] < 2.5
        finally:
            for worker in started:
                worker.close()
