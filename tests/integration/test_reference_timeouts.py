"""Defects 5 and 6 of the reference, on every link: timeouts that did not hold, and deaths that nobody saw."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from paceline._base.waits import loop_thread
from paceline._group import Group
from paceline._links.grpc_door import Door
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.local import LocalMesh
from paceline.errors import (
    OperationTimeout,
    PeerLost,
)
from paceline.testing import local_groups
from support.grpc_pair import grpc_world
from support.reference import MIB, Background, X, states, talk_both_ways, wait_for
from support.worlds import SOON, run_over, world_over

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).

pytestmark = pytest.mark.alone

# 5. No timeout held while sending: a ring blocked for 8 s with a timeout of 0.5 s; 0 meant another thing on each
# backend; 50 ms were told as "0s".


@pytest.mark.parametrize("call", ["broadcast", "all_reduce", "send"])
def test_5_a_timeout_holds_while_sending_to_a_live_peer_that_takes_nothing(call: str, link: str) -> None:
    big = np.zeros((80 if call == "send" else 64) * MIB, np.uint8)
    calls: dict[str, Callable[[Group], object]] = {
        "broadcast": lambda g: g.broadcast(big, root=0, timeout=0.5),
        "all_reduce": lambda g: g.all_reduce(big, timeout=0.5),
        "send": lambda g: g.send(big, 1, timeout=0.5),
    }
    with world_over(link, 2) as groups:
        started = time.monotonic()
        with pytest.raises(OperationTimeout, match=r"[01]\.\d+ s") as caught:
            calls[call](groups[0])
        assert 0.5 <= time.monotonic() - started < 1.5
        assert caught.value.ranks == (1,)


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "broadcast", "all_gather", "recv"])
def test_5_a_timeout_of_0_waits_for_nothing_everywhere(call: str, link: str) -> None:
    calls: dict[str, Callable[[Group], object]] = {
        "all_reduce": lambda g: g.all_reduce(X, timeout=0),
        "barrier": lambda g: g.barrier(timeout=0),
        "broadcast": lambda g: g.broadcast(X, root=1, timeout=0),
        "all_gather": lambda g: g.all_gather(X, timeout=0),
        "recv": lambda g: g.recv(1, timeout=0),
    }
    with world_over(link, 2) as groups:
        started = time.monotonic()
        with pytest.raises(OperationTimeout):
            calls[call](groups[0])
        assert time.monotonic() - started < 0.3


def test_5_nothing_to_wait_for_is_no_timeout(link: str) -> None:
    def rank(group: Group) -> Any:
        group.barrier(timeout=0)
        group.send(X, 0, timeout=0)
        return group.recv(0, timeout=0)[0].tolist(), group.all_reduce(X, timeout=0).tolist()

    assert run_over(link, 1, rank) == [([1] * 4, [1] * 4)]


# 6. A dead peer was not seen: closure was never reported, and no read meant no news.


def die(group: Group, doors: list[Door]) -> None:
    """What the death of the member's process does to its links: they end without a word."""
    mesh = group.mesh
    if isinstance(mesh, LocalMesh):
        mesh.cut()
        return
    assert isinstance(mesh, GrpcMesh)
    loop_thread().run(mesh.end())
    (server,) = doors[mesh.rank]._servers
    loop_thread().run(server.stop(None))


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_6_a_death_is_news_to_whoever_waits(call: str, link: str) -> None:
    calls: dict[str, Callable[[Group], object]] = {
        "all_reduce": lambda g: g.all_reduce(X),
        "recv": lambda g: g.recv(1, timeout=20.0),
    }
    with ExitStack() as stack:
        doors: list[Door] = []
        if link == "local":
            groups = local_groups(2, SOON)
        else:
            made = stack.enter_context(grpc_world(2, kind=link))
            doors, groups = made.doors, [Group(mesh, SOON) for mesh in made.meshes]
        for group in groups:
            stack.callback(group.close, 0.2)
        talk_both_ways(groups)
        waiting = Background(lambda: calls[call](groups[0]))
        wait_for(lambda: states(groups[0])[-1] == (call, "running"))
        killed = time.monotonic()
        die(groups[1], doors)
        with pytest.raises(PeerLost) as caught:
            waiting.result()
        assert waiting.ended - killed < 1.0
        assert caught.value.ranks == (1,)
