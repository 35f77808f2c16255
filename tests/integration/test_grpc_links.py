"""Links between members keep the published rules, whatever carries their frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from time import monotonic

import pytest
from grpc import aio
from grpc.aio._call import StreamStreamCall
from unit.links.shm_pair import lent

from paceline._base.waits import loop_thread
from paceline._collectives.blame import link_ended
from paceline._links.base import LinkEnded, Peer, Purpose
from paceline._links.fault import Fault, Suspicion
from paceline._links.frame import Frame, FrameKind
from paceline._links.grpc_door import Door
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.member_link import MemberLink
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline.testing import LinkPair, check_link
from paceline_protocol import OURS
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.grpc_pair import JOB, grpc_world
from support.ports import free_port


@contextmanager
def link_pair(kind: str, streams: int = 1) -> Iterator[LinkPair]:
    with grpc_world(kind=kind, streams=streams) as world:
        a = world.meshes[0].link(1, Purpose.COLLECTIVE)
        b = world.meshes[1].link(0, Purpose.COLLECTIVE)
        yield LinkPair(a, b, *world.faults, partial(world.lose, 1), empty=lent)


@pytest.mark.alone  # some rules say how soon
@pytest.mark.parametrize(("kind", "streams"), [("grpc", 1), ("tcp", 1), ("tcp", 4), ("shm", 1)])
def test_links_of_each_kind_pass_the_link_checks(kind: str, streams: int) -> None:
    check_link(partial(link_pair, kind, streams))
    with link_pair(kind, streams) as pair:
        pair.a.send(Frame(FrameKind.DATA, pair.generation, 1, 0, b"", b"x"), monotonic() + 5)
        assert pair.b.recv(monotonic() + 5).payload == b"x"
        assert pair.a.kind == kind
        assert pair.a.mark(3, monotonic() + 5) == (kind == "shm")


@pytest.mark.parametrize("kind", ["grpc", "tcp", "shm"])
def test_send_after_half_close_raises_link_ended(kind: str) -> None:
    """Before the peer's answer too: it would be a frame more than was announced, and lost."""
    with link_pair(kind) as pair:
        frame = Frame(FrameKind.DATA, pair.generation, 1, 0, b"", b"x")
        pair.a.send(frame, monotonic() + 5)
        assert isinstance(pair.a, MemberLink)
        pair.a.half_close(FrameKind.CLOSE, monotonic() + 5)
        for send in (pair.a.send, pair.a.lend):
            with pytest.raises(LinkEnded) as caught:
                send(frame, monotonic() + 5)
            assert caught.value.orderly
        assert pair.b.recv(monotonic() + 5).payload == b"x"
        with pytest.raises(LinkEnded) as caught:
            pair.b.recv(monotonic() + 5)
        assert caught.value.orderly
        assert not pair.fault_b.failed


def test_a_stream_that_ends_while_it_is_closed_is_no_unexpected_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC raises an error of its own then, which is none of a call's."""
    close = StreamStreamCall.done_writing

    async def ends_meanwhile(call: StreamStreamCall) -> None:
        await close(call)
        raise aio.InternalError('Failed "execute_batch"')

    monkeypatch.setattr("grpc.aio._call.StreamStreamCall.done_writing", ends_meanwhile)
    with link_pair("grpc") as pair:
        assert isinstance(pair.a, MemberLink)
        pair.a.half_close(FrameKind.CLOSE, monotonic() + 5)
        with pytest.raises(LinkEnded) as caught:
            pair.b.recv(monotonic() + 5)
        assert caught.value.orderly
    assert "failed unexpectedly" not in caplog.text


BROKE = ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL


def test_a_lost_link_reports_whether_it_was_ever_open() -> None:
    with grpc_world() as world:
        link, back = world.meshes[0].link(1, Purpose.COLLECTIVE), world.meshes[1].link(0, Purpose.COLLECTIVE)
        # Until its stream has opened, the end of a link is no evidence. By the time of an answer it has.
        for sender, receiver in ((link, back), (back, link)):
            sender.send(Frame(FrameKind.DATA, 1, 1, 0, b"", b"x"), monotonic() + 5)
            receiver.recv(monotonic() + 5)
        assert first_suspicion(world.faults[0], lambda: world.lose(1)).unopened is False
    thread, fault = loop_thread(), Fault(1, 0, 0.05)
    door = Door(JOB, IN_THE_CLEAR, Config())
    peers = [Peer(rank, f"member-{rank}", f"host-{rank}", f"127.0.0.1:{free_port()}", 100) for rank in range(2)]
    mesh = GrpcMesh(JOB, 1, OURS.newest, 0, peers, fault, thread, 3.0, IN_THE_CLEAR, door.kinds)
    link = mesh.link(1, Purpose.COLLECTIVE)
    with pytest.raises(LinkEnded, match="its address refuses connections") as caught:
        link.recv(monotonic() + 5)
    assert link_ended(peers, 0, 1, 1, "all_reduce", caught.value).unopened is True
    thread.run(mesh.end())


def first_suspicion(fault: Fault, do: Callable[[], object]) -> Suspicion:
    failed = Event()
    fault.on_failure(failed.set)
    do()
    assert failed.wait(5)
    assert fault.first is not None
    return fault.first


def test_a_protocol_breach_is_relayed_after_a_short_delay() -> None:
    with grpc_world() as world:
        link = world.meshes[0].link(1, Purpose.COLLECTIVE)
        link.send(Frame(FrameKind.DATA, 1, 1, 0, b"", b"x"), monotonic() + 5)
        began = monotonic()
        seen = Suspicion(BROKE, 1, 1, "rank 1 sent nonsense")
        heard = first_suspicion(world.faults[1], lambda: world.faults[0].suspect(seen))
        assert (heard.reason, heard.accused, heard.relayed) == (BROKE, 1, True)
        assert monotonic() - began >= 0.05


def test_a_leaving_member_relays_a_breach_before_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bool] = []
    send = GrpcMesh._send_last

    def sending(mesh: GrpcMesh, data: bytes) -> None:
        sent.append(mesh._closed)
        send(mesh, data)

    monkeypatch.setattr(GrpcMesh, "_send_last", sending)
    with grpc_world() as world:
        world.meshes[0].link(1, Purpose.COLLECTIVE)
        world.faults[0].suspect(Suspicion(BROKE, 1, 1, "rank 1 sent nonsense"))
        world.meshes[0].close(monotonic() + 5)
        assert sent[:1] == [False], "its peers hear that it leaves, and take it for lost"
