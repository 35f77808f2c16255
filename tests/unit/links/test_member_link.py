"""A link whose mesh ends while a thread is inside: what it uses is given back when it has come out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import numpy as np
import pytest
from unit.links.shm_pair import halves

from paceline._base.waits import loop_thread
from paceline._links.base import LinkEnded, LinkTimeout, Peer
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline._links.kind import Incoming, Outgoing
from paceline._links.member_link import MemberLink
from paceline._links.shm.arena import Arena
from paceline.errors import PeerLost
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

FRAME = Frame(FrameKind.DATA, 1, 1, 0, b"", b"x")


class Waiting:
    """Holds whoever comes in until it is let go, and knows if it was closed meanwhile."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.inside = self.was_closed = self.closed_inside = False

    def hold(self) -> None:
        self.inside = True
        self.entered.set()
        assert self.let_go.wait(10.0)
        self.inside = False

    def shut_down(self) -> None:
        self.was_closed = True
        self.closed_inside |= self.inside


class Out(Outgoing):
    kind = "shm"

    def __init__(self, at: Waiting) -> None:
        self.frames = self.sent_bytes = 0
        self.at = at

    def send(self, frame: Frame, deadline: float) -> None:
        self.at.hold()

    def lend(self, frame: Frame, deadline: float) -> None:
        self.at.hold()

    def await_release(self, deadline: float) -> None:
        self.at.hold()

    def recall(self) -> None:
        self.at.hold()

    def flush(self, deadline: float) -> None:
        """All is there."""

    def wake(self) -> None:
        """Nobody is woken."""

    def end(self, error: LinkEnded) -> None:
        """See `wake`."""

    def close(self) -> None:
        self.at.shut_down()


class In(Incoming):
    kind = "shm"

    def __init__(self, at: Waiting) -> None:
        self.at = at
        self.first = True

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        if not self.first:
            self.at.hold()
        self.first = False
        return FRAME

    def release(self) -> None:
        self.at.hold()

    def on_readable(self, notify: Callable[[], None]) -> None:
        """Nothing comes."""

    def wake(self) -> None:
        """Nobody is woken."""

    def end(self, error: LinkEnded, frames: int | None = None) -> None:
        """See `wake`."""

    def close(self) -> None:
        self.at.shut_down()


def test_release_raises_link_ended_after_shut() -> None:
    loop = loop_thread().loop
    link = MemberLink(Peer(1, "b", "host-b"), Fault(1, 0, 0.0), loop)
    link.shut()
    with pytest.raises(LinkEnded):
        link.release()


@pytest.mark.parametrize("call", ["send", "lend", "await_release", "recall", "recv", "release"])
def test_shut_closes_no_half_while_a_thread_is_inside_a_call(call: str) -> None:
    out, into, loop = Waiting(), Waiting(), loop_thread().loop
    at = into if call in ("recv", "release") else out
    link = MemberLink(Peer(1, "b", "host-b"), Fault(1, 0, 0.0), loop)
    link.send_by(Out(out))
    link.receive_by(In(into))
    later = monotonic() + 10.0
    link.recv(later)  # the way in is in use
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: link.send(FRAME, later),
        "lend": lambda: link.lend(FRAME, later),
        "await_release": lambda: link.await_release(later),
        "recall": link.recall,
        "recv": lambda: link.recv(later),
        "release": link.release,
    }
    thread = threading.Thread(target=calls[call])
    thread.start()
    assert at.entered.wait(10.0)
    link.shut()
    at.let_go.set()
    thread.join(10.0)
    assert out.was_closed
    assert into.was_closed
    assert not at.closed_inside


def test_recv_waits_until_the_incoming_half_has_its_notify_callback() -> None:
    """Else the reader and the loop would both arm what tells of arrivals."""
    link = MemberLink(Peer(1, "b", "host-b"), Fault(1, 0, 0.0), loop_thread().loop)
    rung: list[bool] = []

    class Told(In):
        def on_readable(self, notify: Callable[[], None]) -> None:
            with pytest.raises(LinkTimeout):
                link.recv(0.0)
            rung.clear()

    link.on_readable(lambda: rung.append(True))
    link.receive_by(Told(Waiting()))
    assert rung, "what had come was not told of"
    assert link.recv(0.0) is FRAME


@pytest.mark.parametrize("call", ["send", "recv", "mark", "await_mark"])
@pytest.mark.parametrize("end", ["failure", "end", "shut"])
def test_a_failure_end_or_shut_wakes_a_thread_waiting_for_the_peer(call: str, end: str) -> None:
    """Before the halves are there (I7)."""
    fault = Fault(1, 0, 0.0)
    loop = loop_thread().loop
    link = MemberLink(Peer(1, "b", "host-b"), fault, loop, slice_s=3_600.0)  # by itself it looks around only then
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            getattr(link, call)(*{"send": [FRAME], "mark": [1]}.get(call, []), monotonic() + 100.0)
        except (LinkEnded, PeerLost) as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not (link._sending or link._receiving):
        pass
    if end == "failure":
        fault.settle(Verdict(1, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 0, "rank 1 is lost"))
    elif end == "end":
        link.end_in(LinkEnded("rank 1 left", orderly=True))
        link.end_out(LinkEnded("rank 1 left", orderly=True))
    else:
        link.shut()
    thread.join(20.0)
    (error,) = raised
    assert str(error) == {"failure": "rank 1 is lost", "end": "rank 1 left", "shut": "the link is closed"}[end]


def test_a_half_added_after_the_link_ended_gets_the_same_end() -> None:
    at = Waiting()
    link = MemberLink(Peer(1, "b", "host-b"), Fault(1, 0, 0.0), loop_thread().loop)
    ends: list[LinkEnded] = []

    class Ended(Out):
        def end(self, error: LinkEnded) -> None:
            ends.append(error)

    class EndedIn(In):
        def end(self, error: LinkEnded, frames: int | None = None) -> None:
            ends.append(error)

    gone = LinkEnded("rank 1 left", orderly=True)
    link.end_in(gone)
    link.end_out(gone)
    link.receive_by(EndedIn(at))
    link.send_by(Ended(at))
    assert ends == [gone, gone]


def test_an_outgoing_half_added_after_shut_is_closed() -> None:
    out, loop = Waiting(), loop_thread().loop
    link = MemberLink(Peer(1, "b", "host-b"), Fault(1, 0, 0.0), loop)
    link.shut()
    link.send_by(Out(out))
    assert out.was_closed


def test_await_release_raises_link_ended_after_shut() -> None:
    loop = loop_thread().loop
    link = MemberLink(Peer(1, "b", "host-b"), Fault(1, 0, 0.0), loop)
    link.send_by(Out(Waiting()))
    link.shut()
    with pytest.raises(LinkEnded, match="closed"):
        link.await_release(monotonic() + 10.0)


def test_recall_waits_for_a_concurrent_close_that_takes_payloads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, closing, taken_back = Arena(), threading.Event(), threading.Event()
    x = arena.empty((1 << 20,), np.uint8)
    with halves(arena) as both:
        outgoing, take_back = both.outgoing, both.outgoing._take_back

        def slowly() -> None:
            closing.set()
            assert taken_back.wait(10.0)
            take_back()

        outgoing.lend(Frame(FrameKind.DATA, 1, 1, 0, b"", x.data), monotonic() + 5.0)
        monkeypatch.setattr(outgoing, "_take_back", slowly)
        closes, recalls = threading.Thread(target=outgoing.close), threading.Thread(target=outgoing.recall)
        closes.start()
        assert closing.wait(10.0)
        recalls.start()
        recalls.join(0.1)
        assert recalls.is_alive(), "the array was the caller's before the reader was told"
        taken_back.set()
        closes.join(10.0)
        recalls.join(10.0)
        with pytest.raises(LinkEnded, match="took back"):
            both.incoming.recv(monotonic() + 5.0)


def test_on_readable_after_close_notifies_at_once() -> None:
    told = threading.Event()
    with halves() as both:
        both.incoming.close()
        both.incoming.on_readable(told.set)
        assert told.is_set()
        with pytest.raises(LinkEnded):
            both.incoming.recv(monotonic() + 5.0)


def test_recv_of_a_lent_payload_raises_after_its_writer_closed() -> None:
    """A mesh may end before the operation that has failed comes to take back what it had lent."""
    arena = Arena()
    x = arena.empty((1 << 20,), np.uint8)
    with halves(arena) as both:
        both.outgoing.lend(Frame(FrameKind.DATA, 1, 1, 0, b"", x.data), monotonic() + 5.0)
        both.outgoing.close()
        x.fill(7)  # it is its owner's again
        with pytest.raises(LinkEnded, match="took back"):
            both.incoming.recv(monotonic() + 5.0)
