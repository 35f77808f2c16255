"""Connections at a worker's door: those without a call go, those of hosts that are gone go, and links stay."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from socket import socket

import numpy as np
import pytest

from integration.mixed_world import Place, kinds_of, mixed_world, run_all
from paceline._base.waits import loop_thread
from paceline._links.grpc_door import Door, DoorLimits
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from support.grpc_pair import JOB
from support.http2 import DATA, PREFACE, SETTINGS, claimed, connect, frame, open_call

SOON = 20.0
PING = 6


def _is_closed(there: socket, seconds: float, on_frame: Callable[[int, int, bytes], None] = lambda *_: None) -> bool:
    """True if the other side closes the connection within the time; frames that come are passed on."""
    end, data = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0:
        there.settimeout(left)
        with suppress(TimeoutError):
            try:
                piece = there.recv(1 << 16)
            except ConnectionResetError:
                return True
            if not piece:
                return True
            data += piece
        while len(data) >= 9 and len(data) >= (size := 9 + int.from_bytes(data[:3], "big")):
            on_frame(data[3], data[4], data[9:size])
            data = data[size:]
    return False


@pytest.mark.parametrize("link", ["grpc", "tcp", "shm"])
def test_an_idle_connection_is_closed_but_an_idle_link_stays_open(link: str) -> None:
    places, limits = [Place(links=(link, "grpc"))] * 2, DoorLimits(idle_s=0.3)
    with mixed_world(places, limits=limits) as world, ExitStack() as stack:
        run_all(world.groups, lambda group: group.barrier())
        made = [dict(mesh._links) for mesh in world.meshes]
        for _ in range(3):
            there = stack.enter_context(connect(world.meshes[0].peers[1].address))
            there.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            assert _is_closed(there, SOON)
        totals = run_all(world.groups, lambda group: float(group.all_reduce(np.ones(1000))[0]))
        assert totals == [2.0, 2.0]
        assert [dict(mesh._links) for mesh in world.meshes] == made, "over the links that were there"
        assert set(kinds_of(world.meshes[0]).values()) == {link}


@pytest.mark.parametrize("answers", [False, True])
def test_calls_of_a_host_that_answers_no_pings_are_ended(answers: bool) -> None:
    """It has a call that lasts, and answers no ping; nothing else tells it from one that has nothing to say."""
    limits = DoorLimits(ping_s=0.2, pong_s=1.5)
    pings = []

    def answer(kind: int, flags: int, payload: bytes) -> None:
        if kind == PING and not flags:
            pings.append(payload)
            if answers:
                there.sendall(frame(PING, 1, 0, payload))

    with ExitStack() as stack:
        door = Door(JOB, IN_THE_CLEAR, Config(failure_timeout=0.2), limits=limits)
        port = loop_thread().run(door.start("127.0.0.1", 0))
        stack.callback(lambda: loop_thread().run(door.close(0.0)))
        there = stack.enter_context(connect(f"127.0.0.1:{port}"))
        there.sendall(open_call("/pacelinepb.v1.PeerService/Hello") + frame(DATA, 0, 1, claimed(100) + b"x"))
        assert _is_closed(there, 4.0 if answers else SOON, answer) is not answers
        assert len(pings) > 3 if answers else pings


def test_the_doors_ping_timeout_is_at_least_failure_timeout() -> None:
    assert Door(JOB, IN_THE_CLEAR, Config(failure_timeout=100.0))._pong_seconds == 100.0
    assert Door(JOB, IN_THE_CLEAR)._pong_seconds == DoorLimits().pong_s
