"""A sender that is held up by its peer hears the verdict, not only its own suspicion."""

from __future__ import annotations

import threading
import time

import pytest

from paceline import errors
from paceline._loop import loop_thread
from paceline.links.base import Purpose
from paceline.links.fault import Suspicion, Verdict
from paceline.links.frame import Frame, FrameKind
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.grpc_pair import grpc_world

LOST = ErrorReason.ERROR_REASON_PEER_LOST


def test_a_blocked_sender_leaves_the_loop_free_to_bring_the_verdict() -> None:
    caught: list[errors.PacelineError] = []
    with grpc_world(verdict_timeout=5.0) as world:
        link = world.meshes[0].link(1, Purpose.COLLECTIVE)
        frame = Frame(FrameKind.DATA, 1, 1, 0, b"", bytes(1 << 20))
        blocked = threading.Event()

        def send() -> None:
            with pytest.raises(errors.PeerLost) as info:
                while True:
                    try:
                        link.send(frame, time.monotonic() + 0.5)
                    except TimeoutError:
                        blocked.set()
            caught.append(info.value)

        sender = threading.Thread(target=send)
        sender.start()
        assert blocked.wait(20.0)
        start = time.monotonic()
        world.faults[0].suspect(Suspicion(LOST, 1, 4, "as this member saw it"))
        verdict = Verdict(1, LOST, (1,), 4, "as the coordinator decided")
        loop_thread().loop.call_soon_threadsafe(world.faults[0].settle, verdict)
        sender.join()
        assert time.monotonic() - start < 1.0
    assert [str(error) for error in caught] == ["as the coordinator decided"]
