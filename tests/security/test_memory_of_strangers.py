"""Strangers who make grpc keep more and more of the headers of their calls, at a coordinator and at a worker's door.

Without the guard (`pacelinepb.memory_guard`) each of these takes 0.6 to 3.7 GB, for 12 MB that are sent, or for as long
as the stranger goes on. `-s` shows what each takes now.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from security.siege import siege

from paceline._base.rpc import grpc
from paceline.testing import coordinator
from paceline_server import Coordinator, ServerSettings
from pacelinepb.grpc_metadata import TooMuchMetadata
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.coordinator import run
from support.http2 import CONTINUATION, END_HEADERS, HEADERS, PREFACE, SETTINGS, connect, frame, inflated
from support.processes import Worker

pytestmark = [pytest.mark.alone, pytest.mark.slow]

TOKEN = "a-token-that-nobody-guesses"
FIELDS = 320_000
"""Of a call; grpc takes 16 MiB of them as HTTP/2 counts, 32 bytes for each and its text."""

MOST_BYTES = 300 << 20
PATIENCE = 10.0
"""Seconds for an answer on a machine where other tests run. At rest the longest is 0.1 s."""

SECONDS = 3.0

BEGIN = PREFACE + frame(SETTINGS, 0, 0, b"")


def sends(method: str, count: int) -> bytes:
    """So many calls that are cancelled, or one whose headers do not end."""
    if not count:
        return BEGIN + inflated(method, 1, FIELDS, whole=False)
    return BEGIN + b"".join(inflated(method, 2 * number + 1, FIELDS) for number in range(count))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Strangers:
    """Each sends the same on a connection of its own, and if told to, comes again whenever it is cut off.

    Attributes:
        came: connections that have ended.
    """

    def __init__(self, address: str, data: bytes, number: int, *, go_on: bool = False) -> None:
        self.came = 0
        self._address, self._data, self._go_on = address, data, go_on
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with suppress(OSError), connect(self._address, 2 * SECONDS) as there:
                there.sendall(self._data)
                there.settimeout(0.1)
                while not self._over.is_set():
                    with suppress(TimeoutError):
                        if not there.recv(1 << 16):
                            break
            self.came += 1
            if not self._go_on or self._over.is_set():
                return


def most_of(resident: Callable[[], int], seconds: float) -> int:
    """The most memory that it has within so many seconds."""
    most, until = 0, time.monotonic() + seconds
    over = threading.Event()
    while time.monotonic() < until:
        most = max(most, resident())
        over.wait(0.02)
    return most


ATTACKS = {
    "40 calls that are cancelled, on 1 connection": (40, 1, False),
    "40 calls that are cancelled, on 8 connections": (5, 8, False),
    "headers that do not end, on 40 connections": (0, 40, False),
    "8 who come again at once": (5, 8, True),
}


@pytest.mark.parametrize(("count", "number", "go_on"), ATTACKS.values(), ids=ATTACKS)
def test_a_coordinator_under_attack_stays_small_and_answers_members(
    count: int, number: int, go_on: bool, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(TOKEN)
    with siege(tmp_path, TOKEN, token_file=str(tokens)) as besieged, ExitStack() as stack:
        strangers = Strangers(besieged.address, sends("/pacelinepb.v1.StoreService/Get", count), number, go_on=go_on)
        stack.callback(strangers.close)
        grown = most_of(besieged.grown, SECONDS)
        answers, stored = besieged.noticed()
    said = f"{grown >> 20} MiB, {strangers.came} connections; a barrier took {answers[-1]:.3f} s at most"
    sys.stdout.write(f"\n{said}")
    assert grown < MOST_BYTES
    assert answers[-1] < PATIENCE
    assert stored[-1] < PATIENCE
    log = (tmp_path / "stderr").read_text()
    assert log.count("cut off a connection from 127.0.0.1: ") == 1, "there is one line a minute"


MEMBER = """
from pathlib import Path
session = paceline.join(job="job")
emit("in")
steps = 0
while not session.group.all_reduce(np.array([float(Path(os.environ["OVER"]).exists())]))[0]:
    steps += 1
emit("out", steps=steps, generation=session.generation)
session.leave()
"""


@pytest.mark.parametrize("go_on", [False, True], ids=["once", "again and again"])
def test_a_worker_under_attack_stays_small_and_keeps_training(go_on: bool, tmp_path: Path) -> None:
    over = tmp_path / "over"
    with coordinator() as address, ExitStack() as stack:
        where = {"PACELINE_COORDINATOR": address, "PACELINE_MIN_WORKERS": "2", "PACELINE_LINKS": "grpc"}
        workers = [Worker(MEMBER, {**where, "OVER": str(over)}) for _ in range(2)]
        for worker in workers:
            stack.callback(worker.close)
        for worker in workers:
            worker.expect("in")
        with grpc.insecure_channel(address) as channel:
            detail = AdminServiceStub(channel).GetJob(admin_pb2.GetJobRequest(job="job"), timeout=10)
        member = detail.members[0].member
        before = resident(member.process.pid)
        strangers = Strangers(member.address, sends("/pacelinepb.v1.PeerService/Hello", 5), 8, go_on=go_on)
        stack.callback(strangers.close)
        grown = most_of(lambda: resident(member.process.pid) - before, SECONDS)
        over.touch()
        ends = [worker.expect("out") for worker in workers]
        sys.stdout.write(f"\n{grown >> 20} MiB, {strangers.came} connections; {ends[0]['steps']} steps")
        assert grown < MOST_BYTES
        assert {end["generation"] for end in ends} == {1}, "a link was cut off"
        assert [worker.wait() for worker in workers] == [0, 0]
        assert sum(worker.stderr.count("cut off a connection from 127.0.0.1: ") for worker in workers) == 1


def test_too_much_metadata_is_refused_before_parsing(caplog: pytest.LogCaptureFixture) -> None:
    """They would keep the loop busy for half a second for each call. The caller is not cut off: it sends too little."""

    async def main() -> None:
        server = Coordinator(ServerSettings(listen="127.0.0.1:0", token=TOKEN))
        address = await server.start()
        try:
            await asyncio.to_thread(refused, address)
        finally:
            await server.stop(grace=0.2)

    def refused(address: str) -> None:
        with connect(address) as there, there.makefile("rb") as heard:
            there.sendall(BEGIN + inflated("/pacelinepb.v1.StoreService/Get", 1, 1_000, whole=False))
            there.sendall(frame(CONTINUATION, END_HEADERS, 1, b""))
            while (head := heard.read(9))[3] != HEADERS or head[8] != 1:
                heard.read(int.from_bytes(head[:3], "big"))

    with caplog.at_level(logging.ERROR):
        run(main)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [TooMuchMetadata]
