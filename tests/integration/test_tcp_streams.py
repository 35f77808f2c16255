"""Tcp halves between two hosts with several streams on a far line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from support.netns import Host, Network
from support.tapnet import Cable, tap_network

pytestmark = [pytest.mark.alone, pytest.mark.needs(what="root"), pytest.mark.timeout(120)]

_WINDOW = 512 << 10
"""Bytes that a kernel may have on its way on one connection."""

_SIDE = """
import asyncio, json, sys, threading, time
from paceline._base.waits import loop_thread
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.tcp import TcpHost, connect

me, here, there, streams, total, rounds, both = int(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:8])
FRAME, AHEAD = 1 << 20, 4
thread, fault = loop_thread(), Fault(1, me, 1.0)
host, come, event = TcpHost(thread.loop, None), [], threading.Event()
tickets = [bytes([rank]) * 16 for rank in range(2)]

def late():
    return time.monotonic() + 60

async def listen():
    host.expect(tickets[1 - me], streams, lambda half: (come.append(half), event.set()), fault, "the other")
    return await host.start(here)

async def dial(port):
    loop = asyncio.get_running_loop()
    return await connect(there, port, tickets[me], streams, fault, "the other", loop=loop, timeout=20.0)

print(json.dumps({"port": thread.run(listen())}), flush=True)
out = thread.run(dial(int(sys.stdin.readline())))
assert event.wait(20.0)
(into,) = come

def frame(payload):
    return Frame(FrameKind.DATA, 1, 1, 0, b"", payload)

def meet():
    out.send(frame(b"x"), late())
    into.recv(late())

ours, theirs = memoryview(bytearray(b"x" * total)), memoryview(bytearray(total))
for _ in range(rounds):
    theirs[:] = bytes(total)
    meet()
    start = time.perf_counter()
    sent = 0
    for begin in range(0, total, FRAME):  # as in an all_reduce: not more than four frames ahead of what has come
        ahead = begin + AHEAD * FRAME if both else total
        while (me == 0 or both) and sent < min(total, ahead):
            out.lend(frame(ours[sent : sent + FRAME]), late())
            sent += FRAME
        if me == 1 or both:
            into.recv(late(), theirs[begin : begin + FRAME])
            into.release()
    out.await_release(late())
    if not both:
        (out.send if me else lambda *_: into.recv(late()))(frame(b"x"), late())
    print(json.dumps({"rate": total / (time.perf_counter() - start)}), flush=True)
    assert theirs == ours or not (me or both)
meet()
out.flush(late())
"""


@contextmanager
def _sides(hosts: Sequence[Host], *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """The program on both hosts, connected; ended with the block."""
    started: list[subprocess.Popen[str]] = []
    try:
        for number, (here, there) in enumerate((hosts, hosts[::-1])):
            words = [sys.executable, "-c", _SIDE, number, here.address, there.address, *arguments]
            started.append(
                subprocess.Popen(
                    here.command([str(word) for word in words]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        ports = [_tell(process)["port"] for process in started]
        for process, port in zip(started, reversed(ports), strict=True):
            assert process.stdin is not None
            process.stdin.write(f"{port:.0f}\n")
            process.stdin.flush()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _tell(process: subprocess.Popen[str]) -> dict[str, float]:
    """The next line of what a program prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended:\n{process.communicate()[1]}"
    told: dict[str, float] = json.loads(line)
    return told


def best_rate(net: Network, streams: int, total: int, *, rounds: int, both: bool) -> float:
    """Bytes a second, each way, in the best of the rounds."""
    with _sides(net.hosts, streams, total, rounds, int(both)) as sides:
        return max(min(_tell(side)["rate"] for side in sides) for _ in range(rounds))


def _limit_windows(net: Network) -> None:
    for host in net.hosts:
        for name in ("tcp_rmem", "tcp_wmem"):
            setting = f"net.ipv4.{name}=4096 65536 {_WINDOW}"
            subprocess.run(host.command(["sysctl", "-qw", setting]), check=True, capture_output=True)


def test_four_streams_triple_the_rate_of_one_at_high_latency() -> None:
    with tap_network([Cable(delay=0.02)] * 2) as net:
        _limit_windows(net)
        one, four = (best_rate(net, streams, 16 << 20, rounds=3, both=False) for streams in (1, 4))
    assert four >= 3 * one, f"{one / 1e6:.1f} MB/s with one stream, {four / 1e6:.1f} with four"
