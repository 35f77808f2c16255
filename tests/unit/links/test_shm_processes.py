"""Two processes: what one writes the other reads, and what is left when one of them is killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NoReturn

import numpy as np
import pytest
from unit.links.shm_pair import PEERS, shm_host

from paceline._base.waits import loop_thread
from paceline._links.base import LinkEnded, LinkTimeout
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.shm.arena import arena
from paceline._links.shm.handover import connect
from paceline._links.shm.incoming import ShmIncoming
from paceline._links.shm.outgoing import ShmOutgoing

PEER = """
import sys
from time import monotonic
import numpy as np
from paceline._base.waits import loop_thread
from paceline._links.base import Peer
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.shm.arena import arena
from paceline._links.shm.handover import ShmHost, connect

name, ticket, what = sys.argv[1:]
thread, fault, peer, made = loop_thread(), Fault(1, 1, 0.05), Peer(0, "member-0", "host-0"), []

async def start():
    host = ShmHost(thread.loop)
    host.expect(bytes.fromhex(ticket), made.append, fault, peer)
    return host

host = thread.run(start())
outgoing = thread.run(connect(name, bytes.fromhex(ticket), fault, peer, thread.loop, 10.0))
print(host.name, flush=True)
assert sys.stdin.readline() == "go\\n"
incoming, later = made[0], monotonic() + 30.0
x = arena().empty((1 << 20,), np.uint8)
x[:] = 5
data = memoryview(x)

def frame(part, payload):
    return Frame(FrameKind.DATA, 1, 1, part, b"", payload)

if what == "echo":
    for part in range(200):
        got = incoming.recv(later)
        assert got.part == part
        outgoing.send(frame(part, got.payload), later)
        incoming.release()
elif what == "send":
    part = 0
    while True:
        (outgoing.lend if part % 2 else outgoing.send)(frame(part, data), later)
        part += 1
elif what == "recv":
    while True:
        incoming.recv(later)
        incoming.release()
elif what == "hold":
    incoming.release()
    incoming.recv(later)
    print("held", flush=True)
    incoming.recv(later)
"""


@dataclass
class Pair:
    peer: subprocess.Popen[str]
    outgoing: ShmOutgoing
    incoming: ShmIncoming

    def kill(self) -> None:
        """Kills the peer, and says so as the control channel would."""
        self.peer.send_signal(signal.SIGKILL)
        self.peer.wait()
        self.outgoing.end(LinkEnded("rank 1 is gone"))
        self.incoming.end(LinkEnded("rank 1 is gone"))


@contextlib.contextmanager
def started(what: str) -> Iterator[Pair]:
    thread, fault, ticket = loop_thread(), Fault(1, 0, 0.05), secrets.token_bytes(16)
    made: list[ShmIncoming] = []
    with shm_host() as (_, host):

        async def expect() -> None:
            host.expect(ticket, made.append, fault, PEERS[1])

        thread.run(expect())
        command = [sys.executable, "-c", PEER, host.name, ticket.hex(), what]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
            assert peer.stdin is not None
            assert peer.stdout is not None
            try:
                name = peer.stdout.readline().strip()
                outgoing = thread.run(connect(name, ticket, fault, PEERS[1], thread.loop, 10.0))
                peer.stdin.write("go\n")
                peer.stdin.flush()
                yield Pair(peer, outgoing, made[0])
            finally:
                peer.kill()
                for half in (*made, outgoing):
                    half.close()


def frame(part: int, payload: bytes | memoryview = b"") -> Frame:
    return Frame(FrameKind.DATA, 1, 1, part, b"", payload)


def later() -> float:
    return monotonic() + 30.0


def test_payloads_echoed_by_a_peer_process_are_unchanged() -> None:
    rng = np.random.default_rng(1)
    with started("echo") as pair:
        for part in range(200):
            payload = rng.bytes(int(rng.integers(0, 10 if part % 3 else 1 << 20)))
            (pair.outgoing.lend if part % 2 else pair.outgoing.send)(frame(part, payload), later())
            got = pair.incoming.recv(later())
            assert got.part == part
            assert got.payload == payload
            pair.incoming.release()
        pair.outgoing.await_release(later())
        assert pair.peer.wait(10) == 0


@pytest.mark.parametrize("frames", [0, 1, 50])
def test_a_writer_killed_while_sending_leaves_complete_frames_and_an_end(frames: int) -> None:
    with started("send") as pair:
        for part in range(frames):
            assert pair.incoming.recv(later()).part == part
            pair.incoming.release()
        pair.kill()
        due = itertools.count(frames)

        def read_on() -> NoReturn:
            while True:
                got = pair.incoming.recv(later())
                assert got.part == next(due)
                assert bytes(got.payload) == b"\x05" * (1 << 20)
                pair.incoming.release()

        with pytest.raises(LinkEnded, match="rank 1 is gone"):
            read_on()
        with pytest.raises(LinkEnded):
            pair.outgoing.send(frame(0), later())


def test_killing_the_reader_ends_a_blocked_send() -> None:
    with started("recv") as pair:
        for part in range(20):
            pair.outgoing.send(frame(part, bytes(1 << 20)), later())
        killer = threading.Thread(target=pair.kill)
        killer.start()

        def send_on() -> NoReturn:
            while True:
                pair.outgoing.send(frame(0, bytes(1 << 20)), later())

        with pytest.raises(LinkEnded, match="rank 1 is gone"):
            send_on()
        killer.join()


def test_killing_the_reader_of_a_lent_payload_ends_await_release() -> None:
    with started("hold") as pair:
        x = arena().empty((1 << 20,), np.uint8)
        pair.outgoing.lend(frame(0, memoryview(x)), later())
        assert pair.peer.stdout is not None
        assert pair.peer.stdout.readline() == "held\n"
        with pytest.raises(LinkTimeout):
            pair.outgoing.await_release(monotonic() + 0.01)
        killer = threading.Thread(target=pair.kill)
        killer.start()
        with pytest.raises(LinkEnded, match="rank 1 is gone"):
            pair.outgoing.await_release(later())
        killer.join()
        pair.outgoing.recall()


def test_a_killed_process_used_no_files_in_dev_shm() -> None:
    with started("send") as pair:
        pair.incoming.recv(later())
        used = Path(f"/proc/{pair.peer.pid}/maps").read_text().splitlines()
        used += [os.readlink(path) for path in Path(f"/proc/{pair.peer.pid}/fd").iterdir()]
        pair.kill()
    assert [each for each in used if "memfd:paceline" in each]
    assert not [each for each in used if "/dev/shm" in each]
