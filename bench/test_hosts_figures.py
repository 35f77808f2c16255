"""Measures how much of a network line all_reduce uses: two network namespaces, 1 Gbit/s each way, no delay.

The same run also measures what is possible: plain TCP sockets on the same line, both ways at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.test_tcp_streams import best_rate
from support.netns import Host, Network, network

pytestmark = [pytest.mark.needs(what="root"), pytest.mark.timeout(120)]

_LINE = 125e6
"""Bytes per second of 1 Gbit/s."""

_SIZE, _ROUNDS = 64 << 20, 5

_PLAIN = """
import json, socket, sys, threading, time
here, there, first = sys.argv[1:]
size = int(2 * 125e6)
if first:
    with socket.create_server((here, 7000)) as server:
        print(json.dumps({"listening": True}), flush=True)
        connection, _ = server.accept()
else:
    connection = socket.create_connection((there, 7000))
with connection:
    sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
    connection.sendall(b"x")
    connection.recv(1)
    start = time.perf_counter()
    sender.start()
    buffer, left = bytearray(1 << 20), size
    while left:
        left -= connection.recv_into(buffer)
    print(json.dumps({"rate": size / (time.perf_counter() - start)}), flush=True)
    sender.join()
"""

_REDUCE = """
import json, statistics, sys, time
import numpy as np
import paceline
from paceline._links.base import Purpose
size, rounds = map(int, sys.argv[1:])
with paceline.join(timeout=30) as session:
    x = np.full(size // 4, session.rank + 1, np.float32)
    result = np.empty_like(x)
    times = []
    for _ in range(rounds + 1):  # the first warms up
        session.group.barrier()
        start = time.perf_counter()
        session.group.all_reduce(x, out=result)
        times.append(time.perf_counter() - start)
    assert (result == 3).all()
    slowest = session.group.all_reduce(np.array(times[1:]), op="max")
    world = session.size
    kind = session.group._core.mesh.link(1 - session.rank, Purpose.COLLECTIVE).kind
    rate = size / statistics.median(slowest.tolist()) * 2 * (world - 1) / world
    print(json.dumps({"rate": rate, "kind": kind}), flush=True)
"""


def _tell(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the next JSON line that a program prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended:\n{process.communicate()[1]}"
    told: dict[str, Any] = json.loads(line)
    return told


@contextmanager
def _programs() -> Iterator[list[subprocess.Popen[str]]]:
    """Yields a list for processes, which are killed at the end of the block."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _run(host: Host, words: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    command = host.command(["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, *words])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _plain(net: Network) -> float:
    """Returns the bytes per second that one TCP connection carries each way, both at once."""
    a, b = net.hosts
    with _programs() as started:
        started.append(_run(a, ["-c", _PLAIN, a.address, b.address, "yes"], {}))
        assert _tell(started[0])["listening"]
        started.append(_run(b, ["-c", _PLAIN, b.address, a.address, ""], {}))
        return min(float(_tell(process)["rate"]) for process in started)


def _reduced(net: Network, kind: str, address: str, more: Sequence[str], variables: dict[str, str]) -> float:
    """Measures bus bandwidth in bytes per second, as nccl-tests does: 2 (W - 1) / W times the array size / time.

    The coordinator is on the first host; each host has one worker, with links of the given kind only.
    """
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PACELINE_FLIGHT_DIR": "off", **variables}
    settings |= {"PACELINE_COORDINATOR": address, "PACELINE_MIN_WORKERS": "2", "PACELINE_LINKS": kind}
    with _programs() as started:
        coordinator = _run(net.hosts[0], ["-m", "paceline_server", "--listen", address, *more], {})
        started.append(coordinator)
        assert coordinator.stdout is not None
        assert "listening" in coordinator.stdout.readline()
        workers = [_run(host, ["-c", _REDUCE, str(_SIZE), str(_ROUNDS)], settings) for host in net.hosts]
        started += workers
        told = [_tell(worker) for worker in workers]
        assert [each["kind"] for each in told] == [kind] * len(workers)
        return min(float(each["rate"]) for each in told)


@pytest.mark.parametrize("how", ["in the clear", "with TLS"])
@pytest.mark.parametrize(("kind", "least"), [("grpc", 0.85), ("tcp", 0.9)])
def test_all_reduce_uses_most_of_the_line(kind: str, least: float, how: str, tmp_path: Path) -> None:
    with network(2) as net:
        for host in net.hosts:
            host.limit(1000)
        secure = _secure(tmp_path, net.hosts[0].address) if how == "with TLS" else ((), {})
        plain = _plain(net)
        reduced = _reduced(net, kind, f"{net.hosts[0].address}:7400", *secure)
    print(
        f"\n1 Gbit/s, W=2 over {kind} {how}, 64 MiB: {reduced / 1e6:.1f} MB/s bus bandwidth, "
        f"{reduced / _LINE:.1%} of the line, {reduced / plain:.1%} of plain TCP ({plain / 1e6:.1f} MB/s)"
    )
    assert reduced >= least * _LINE


def _secure(folder: Path, host: str) -> tuple[Sequence[str], dict[str, str]]:
    """Makes certificates; returns arguments for the coordinator and variables for the workers."""
    command = [sys.executable, "-m", "paceline", "certs", str(folder), "--host", host]
    subprocess.run(command, check=True, capture_output=True)
    ca, cert, key = (str(folder / name) for name in ("ca.pem", "coordinator.pem", "coordinator.key"))
    variables = {"CA": ca, "CERT": str(folder / "member.pem"), "KEY": str(folder / "member.key")}
    arguments = ("--tls-cert", cert, "--tls-key", key, "--tls-ca", ca)
    return arguments, {f"PACELINE_TLS_{name}": value for name, value in variables.items()}


@pytest.mark.parametrize("streams", [1, 4])
def test_tcp_streams_fill_a_line_both_ways_at_once(streams: int) -> None:
    with network(2) as net:
        for host in net.hosts:
            host.limit(1000)
        rate = best_rate(net, streams, 64 << 20, rounds=5, both=True)
    assert rate >= 0.9 * _LINE, f"{rate / 1e6:.1f} MB/s each way, {rate / _LINE:.1%} of the line"
