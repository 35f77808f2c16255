"""Members that leave in good order: in whatever order the others hear of it, those that do not need them go on.

A member that needs one that has left gets an error that names it. What is held up here is held by the test: a member's
view, the opening of a link, the last word on a stream.
"""

from __future__ import annotations

import asyncio
import errno
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import paceline
from paceline._base.waits import loop_thread
from paceline._links import grpc_mesh
from paceline._links.base import LinkEnded, Purpose
from paceline._links.frame import Frame, FrameKind
from paceline._links.grpc_door import Intake
from paceline._links.grpc_mesh import GrpcMesh
from paceline._session.member import MemberConnection
from paceline.config import Config
from paceline.testing import coordinator
from support.grpc_pair import grpc_world

TIMEOUT = 20.0


class Gate:
    """Holds up work on the loop until the test opens it."""

    def __init__(self) -> None:
        self._reached, self._opened = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self._reached.set()
        await self._opened.wait()

    def reached(self) -> None:
        loop_thread().run(asyncio.wait_for(self._reached.wait(), TIMEOUT))

    def open(self) -> None:
        loop_thread().loop.call_soon_threadsafe(self._opened.set)


def dials_have_ended(mesh: Any) -> None:
    """Waits until no link that the mesh has dialled is being opened, or is open."""

    async def wait() -> None:
        if mesh._tasks:
            await asyncio.wait(list(mesh._tasks), timeout=TIMEOUT)

    loop_thread().run(wait())
    assert not mesh._tasks


@contextmanager
def joined(world: int, late: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Future[Any]], Gate]]:
    """Members of a job, in rank order, as far as they have joined; one hears of its view when the gate opens."""
    gate, adopt = Gate(), MemberConnection._adopt

    async def adopt_late(member: MemberConnection, view: Any) -> None:
        if view.rank == late:
            await gate.wait()
        await adopt(member, view)

    monkeypatch.setattr(MemberConnection, "_adopt", adopt_late)

    def join(rank: int) -> paceline.Session:
        config = Config(failure_timeout=1.0)
        return paceline.join(address, job="goodbyes", rank=rank, world_size=world, config=config)

    with coordinator() as address, ThreadPoolExecutor(world) as pool:
        members = [pool.submit(join, rank) for rank in range(world)]
        try:
            gate.reached()
            yield members, gate
        finally:
            gate.open()
            list(pool.map(lambda member: member.result(TIMEOUT).leave(), members))


@pytest.mark.parametrize("leavers", [[1], [1, 2]], ids=["one", "two at once"])
def test_members_that_do_not_need_a_departed_peer_continue(leavers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would open a link to rank 1 with its view, and finds its door shut."""
    with joined(2 + len(leavers), 0, monkeypatch) as (members, gate), ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: members[rank].result(TIMEOUT).leave(), leavers))
        gate.open()
        stay = [members[0].result(TIMEOUT), members[-1].result(TIMEOUT)]
        dials_have_ended(stay[0].group._core.mesh)

        def total(session: paceline.Session) -> float:
            part = session.group.subgroup([0, len(members) - 1])
            return float(part.all_reduce(np.ones(1), timeout=TIMEOUT)[0])

        assert list(pool.map(total, stay)) == [2.0, 2.0]


def test_members_that_need_a_departed_peer_raise_peer_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(3, 0, monkeypatch) as (members, gate), ThreadPoolExecutor() as pool:
        members[1].result(TIMEOUT).leave()
        gate.open()

        def error(rank: int) -> paceline.PacelineError | None:
            return pool.submit(members[rank].result(TIMEOUT).group.barrier, TIMEOUT).exception()  # type: ignore[return-value]

        found = list(pool.map(error, [0, 2]))
        assert [type(each) for each in found] == [paceline.PeerLost] * 2
        assert {each.ranks for each in found} == {(1,)}
        (text,) = {str(each) for each in found}
        assert "rank 1" in text
        assert re.search(r"left the job while rank \d \(.*\) needed it: operation \d+, [^:]+$", text)


def test_recv_from_any_rank_keeps_waiting_after_an_unlinked_peer_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with joined(3, 0, monkeypatch) as (members, gate):
        members[1].result(TIMEOUT).leave()
        gate.open()
        stays, last = members[0].result(TIMEOUT), members[2].result(TIMEOUT)
        with pytest.raises(paceline.OperationTimeout):
            stays.group.recv(timeout=1.0)
        last.group.send(np.array([7.0]), 0)
        assert stays.group.recv(timeout=TIMEOUT)[0] == 7
        with pytest.raises(paceline.PeerLost, match="rank 1"):
            stays.group.recv(1, timeout=TIMEOUT)


def test_a_late_view_does_not_break_an_unused_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, process_runs = threading.Event(), grpc_mesh.process_runs

    async def runs(*args: Any) -> bool:
        asked.set()
        return await process_runs(*args)

    monkeypatch.setattr(grpc_mesh, "process_runs", runs)
    with joined(2, 1, monkeypatch) as (members, gate), ThreadPoolExecutor() as pool:
        first = members[0].result(TIMEOUT)
        assert asked.wait(TIMEOUT), "the door has answered Hello, so the view was not late"
        assert not first.group._core.mesh.fault.failed
        gate.open()
        sums = pool.map(lambda member: member.result(TIMEOUT).group.all_reduce(np.ones(1), timeout=TIMEOUT)[0], members)
        assert list(sums) == [2.0, 2.0]


FRAME = Frame(FrameKind.DATA, 1, 1, 0, b"", b"x")


def ends_without_blame(mesh: GrpcMesh) -> None:
    """No operation has failed, and one that needs rank 1 will."""
    dials_have_ended(mesh)
    assert not mesh.fault.failed
    link = mesh.link(1, Purpose.COLLECTIVE)
    dials_have_ended(mesh)
    deadline = time.monotonic() + TIMEOUT
    for use in (lambda: link.send(FRAME, deadline), lambda: link.recv(deadline)):
        with pytest.raises(LinkEnded, match="rank 1"):
            use()
    assert not mesh.fault.failed


def hold_up_the_stream(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Streams to rank 1 come to its door when the gate opens: after the hello, and with an open half."""
    gate, open_half = Gate(), grpc_mesh._open

    async def open_late(link: Any, *args: Any) -> Any:
        answer = await open_half(link, *args)
        if link.peer.rank == 1:
            await gate.wait()
        return answer

    monkeypatch.setattr(grpc_mesh, "_open", open_late)
    return gate


@pytest.mark.parametrize("kind", ["grpc", "tcp", "shm"])
@pytest.mark.parametrize("asked", [False, True], ids=["not asked for", "asked for"])
@pytest.mark.parametrize("half_shut", [False, True], ids=["door shut", "door closing"])
def test_a_peer_may_leave_between_hello_and_the_stream_without_blame(
    kind: str, asked: bool, half_shut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_up_the_stream(monkeypatch)
    with grpc_world(3, kind=kind) as world:
        try:
            if asked:
                world.meshes[0].link(1, Purpose.COLLECTIVE)
            gate.reached()
            world.meshes[1].close(time.monotonic() + TIMEOUT)
            loop_thread().run(shut(world.doors[1]._intake) if half_shut else world.doors[1].close())
        finally:
            gate.open()
        ends_without_blame(world.meshes[0])


def test_a_link_that_does_not_open_fails_only_members_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def does_not_open(link: Any, *_: Any) -> LinkEnded:
        return LinkEnded(f"{link.peer}: its door does not open", unopened=True)

    monkeypatch.setattr(grpc_mesh, "dial", does_not_open)
    with grpc_world() as world:
        dials_have_ended(world.meshes[0])
        assert not world.faults[0].failed
        world.meshes[0].link(1, Purpose.COLLECTIVE)
        dials_have_ended(world.meshes[0])
        assert world.faults[0].failed


async def shut(intake: Intake) -> None:
    """What the door does first when it closes."""
    closing = intake.close()
    if closing is not None:
        await closing


def test_a_link_fails_when_the_check_for_a_gone_peer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold_up_the_stream(monkeypatch)

    async def no_descriptor(*_: Any) -> bool:
        raise OSError(errno.EMFILE, "planted")

    with grpc_world(3) as world:
        gate.reached()
        world.meshes[1].close(time.monotonic() + TIMEOUT)
        loop_thread().run(world.doors[1].close())
        monkeypatch.setattr(grpc_mesh, "is_refused", no_descriptor)
        gate.open()
        dials_have_ended(world.meshes[0])
        assert isinstance(world.faults[0].own_error, OSError)


@pytest.mark.parametrize("kind", ["grpc", "tcp", "shm"])
def test_a_closing_door_waits_for_its_last_message_to_be_sent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link on which nothing was ever sent: its stream ends when the peer leaves."""
    serve, accepted = Intake.serve, defaultdict[Intake, Gate](Gate)

    class Busy:
        """A call whose last message takes its time."""

        def __init__(self, intake: Intake, context: Any) -> None:
            self._intake, self._context = intake, context

        def __getattr__(self, name: str) -> Any:
            return getattr(self._context, name)

        async def write(self, message: Any) -> None:
            if message.HasField("drained"):
                await asyncio.sleep(0.5)
            await self._context.write(message)
            accepted[self._intake]._reached.set()

    async def serve_busily(intake: Intake, request: Any, context: Any) -> None:
        await serve(intake, request, Busy(intake, context))

    monkeypatch.setattr(Intake, "serve", serve_busily)
    with grpc_world(3, kind=kind) as world:
        accepted[world.doors[1]._intake].reached()
        world.meshes[1].close(time.monotonic() + TIMEOUT)
        loop_thread().run(world.doors[1].close())
        ends_without_blame(world.meshes[0])
