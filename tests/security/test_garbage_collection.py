"""Garbage holds up no job: refused calls leave none that refers to itself, and full collections are rare.

A full collection stops the coordinator's loop. Strangers could cause one after the other with calls that are refused.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from security.siege import Attacker

from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from paceline_server.errors import NotFound, Unauthenticated
from paceline_server.services.probes import MOST_PROBES, PROBE, Probes
from pacelinepb.v1 import admin_pb2
from support.coordinator import PATIENCE, run
from support.http2 import framed

TOKEN = "a-token-for-somebody-0123456789"
COUNT = 50
GET_JOB = "/pacelinepb.v1.AdminService/GetJob"
UNKNOWN = framed(admin_pb2.GetJobRequest(job="unknown"))
REFUSED = {
    "without a token": ("", GET_JOB, UNKNOWN, COUNT),
    "about an unknown job": (TOKEN, GET_JOB, UNKNOWN, COUNT),
    "probes that give way": ("", PROBE, b"", COUNT - MOST_PROBES),
}
"""By name: the token, the method and the request of each call, and how many of the calls end."""


@pytest.fixture
def only_when_asked() -> Iterator[None]:
    """Collects no garbage by itself, and keeps what is collected."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.usefixtures("only_when_asked")
@pytest.mark.parametrize("which", REFUSED)
def test_a_refused_call_leaves_no_reference_cycle(which: str) -> None:
    """Each left 70 objects: the call refers to its exception, whose traceback referred to the call."""
    token, method, request, ends = REFUSED[which]

    def attack(address: str) -> None:
        attacker = Attacker(address, token)
        attacker.open(method, [request] * COUNT, 1)
        for _ in range(round(PATIENCE / 0.05)):
            if attacker.ended < ends:
                attacker.press(0.05)
        assert attacker.ended == ends
        attacker.close()

    async def main() -> None:
        settings = ServerSettings(listen="127.0.0.1:0", token=TOKEN)
        coordinator = Coordinator(settings, probes=Probes(patience_s=3_600.0))
        await asyncio.to_thread(attack, await coordinator.start())
        await coordinator.stop(grace=0.2)

    run(main)
    gc.collect()
    left = Counter(type(each) for each in gc.garbage)
    assert [left[error] for error in (aio.AbortError, Unauthenticated, NotFound)] == [0, 0, 0]


_SERVE = """
import gc, json, os, signal
from paceline_server import ServerSettings
from paceline_server.serving import serve

def announce(address, url):
    before = gc.get_stats()[2]["collections"]
    kept = [[] for _ in range(500_000)]
    print(json.dumps([gc.get_stats()[2]["collections"] - before, gc.get_freeze_count()]), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

serve(ServerSettings(listen="127.0.0.1:0"), announce)
"""


def test_half_a_million_objects_cause_no_full_collection() -> None:
    """That is more than 600 sessions take. What was there at the start is never looked at again."""
    done = subprocess.run([sys.executable, "-c", _SERVE], capture_output=True, text=True, timeout=60, check=True)
    collections, frozen = json.loads(done.stdout)
    assert collections == 0
    assert frozen > 20_000
