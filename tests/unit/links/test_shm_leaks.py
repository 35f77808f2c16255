"""Links come and go with each generation: what they took, they give back."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from unit.links.shm_pair import descriptors, shm_halves, shm_host

from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.shm.arena import Arena


def taken() -> tuple[int, int, int]:
    """Descriptors, threads, mappings of shared memory."""
    count = descriptors()
    return count, threading.active_count(), Path("/proc/self/maps").read_text().count("memfd:paceline")


@pytest.mark.slow
def test_a_thousand_pairs_leak_no_descriptor_thread_or_mapping() -> None:
    arena = Arena()
    x = arena.empty((1 << 20,), np.uint8)

    def one() -> None:
        outgoing, incoming = shm_halves(thread, host, Fault(1, 0, 0.05), Fault(1, 1, 0.05))
        outgoing._arena = arena
        incoming.on_readable(lambda: None)
        outgoing.send(Frame(FrameKind.DATA, 1, 1, 0, b"", bytes(20_000)), 0.0)
        outgoing.lend(Frame(FrameKind.DATA, 1, 1, 0, b"", x.data), 0.0)
        incoming.recv(0.0)
        incoming.recv(0.0)
        incoming.release()
        for half in (outgoing, incoming, outgoing, incoming):
            half.close()

    with shm_host() as (thread, host):
        one()
        before = taken()
        for _ in range(1000):
            one()
        # Fewer descriptors are no leak: those of grpc, of tests before this one, are closed when it comes to it.
        assert all(now <= then for now, then in zip(taken(), before, strict=True))


def test_close_frees_the_resources_of_halves_that_are_still_referenced() -> None:
    with shm_host() as (thread, host):
        before = taken()
        kept = [shm_halves(thread, host, Fault(1, 0, 0.05), Fault(1, 1, 0.05)) for _ in range(10)]
        assert taken() > before
        for halves in kept:
            for half in halves:
                half.close()
                half.wake()
        assert taken() == before
