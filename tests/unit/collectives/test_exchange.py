"""What an exchange makes of frames that it found while it looked around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import pytest

from paceline._collectives.exchange import Disagreement, Exchange
from paceline._links.base import Link, LinkEnded, LinkTimeout, Mesh, Peer, Purpose
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind


def frame(operation: int) -> Frame:
    return Frame(FrameKind.DATA, 1, operation, 0, b"all_reduce op=sum float32[4]", b"x" * 16)


class Marking(Link):
    """Marks and frames lie ready."""

    kind = "test"

    def __init__(self, rank: int, marks: list[int], frames: list[Frame], late: int = 0) -> None:
        self.peer = Peer(rank, f"member-{rank}", "host")
        self.marks, self.frames, self.late = marks, frames, late
        self.released = 0

    def send(self, frame: Frame, deadline: float) -> None:
        pass

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        if not self.frames:
            raise LinkTimeout("nothing")
        return self.frames.pop(0)

    def await_mark(self, deadline: float) -> Frame | int:
        self.late -= 1
        if self.late >= 0 or not self.marks:
            raise LinkTimeout("nothing")
        return self.marks.pop(0)

    def release(self) -> None:
        self.released += 1

    def on_readable(self, notify: Callable[[], None]) -> None:
        pass

    def close(self, deadline: float) -> None:
        pass


class Links(Mesh):
    def __init__(self, *links: Marking) -> None:
        self.generation, self.rank = 1, 0
        self.links = {link.peer.rank: link for link in links}
        self.peers = [Peer(0, "member-0", "host"), *(link.peer for link in links)]
        self.fault = Fault(1, 0, 0.0)

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        return self.links[peer]

    def linked(self, purpose: Purpose, group: str = "") -> Sequence[int]:
        return list(self.links)

    def close(self, deadline: float) -> None:
        pass

    def close_group(self, group: str, deadline: float) -> None:
        pass

    @property
    def bytes_sent(self) -> int:
        return 0


def impatient(links: Links) -> Exchange:
    """An exchange that looks around at once when it has to wait."""
    return Exchange(links, lambda operation: None, patience_s=0.0)


def test_an_early_frame_of_the_next_operation_does_not_hide_a_mark() -> None:
    """Rank 1 comes late to barrier 5; by then rank 2 has passed it, and its next operation's frame has come."""
    exchange = impatient(Links(Marking(1, [5], [], late=1), Marking(2, [5], [frame(6)])))
    exchange.begin(5, b"barrier")
    soon = monotonic() + 10.0
    assert exchange.await_mark(1, soon) == 5
    assert exchange.await_mark(2, soon) == 5
    exchange.begin(6, frame(6).signature)
    assert exchange.recv(2, soon) == frame(6)


def test_a_frame_in_place_of_a_mark_is_returned() -> None:
    exchange = impatient(Links(Marking(1, [5], [], late=1), Marking(2, [], [frame(6)])))
    exchange.begin(6, frame(6).signature)
    soon = monotonic() + 10.0
    assert exchange.await_mark(1, soon) == 5
    assert exchange.await_mark(2, soon) == frame(6)


def test_await_mark_returns_a_later_frame_of_a_rank_that_sent_no_mark() -> None:
    exchange = impatient(Links(Marking(1, [5], [], late=1), Marking(2, [], [frame(6)])))
    exchange.begin(5, b"barrier")
    soon = monotonic() + 10.0
    assert exchange.await_mark(1, soon) == 5
    assert exchange.await_mark(2, soon) == frame(6)


class Placing(Marking):
    """Puts a payload where it belongs."""

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        found = super().recv(deadline)
        return found if into is None else replace(found, payload=into)


def test_a_payload_received_into_place_needs_no_release() -> None:
    link = Placing(1, [], [frame(5)] * 3)
    exchange = Exchange(Links(link), lambda operation: None)
    exchange.begin(5, frame(5).signature)
    soon, place = monotonic() + 10.0, memoryview(bytearray(16))
    assert exchange.recv(1, soon, place).payload is place
    assert not exchange.holds_frames
    exchange.recv(1, soon)
    exchange.recv(1, soon, place)
    assert exchange.holds_frames, "the one before it is still to be released"
    exchange.release()
    assert (link.released, exchange.holds_frames) == (1, False)


class TakenBack(Marking):
    """What it had lent is taken back."""

    def release(self) -> None:
        super().release()
        raise LinkEnded("taken back")


def test_a_disagreement_is_raised_even_if_its_frame_is_taken_back() -> None:
    """Whoever has found out first has failed, and takes back what it lent: the others are to say why, not that."""
    other = TakenBack(2, [], [replace(frame(5), signature=b"all_reduce op=max float32[4]")])
    exchange = impatient(Links(Marking(1, [5], [], late=1), other))
    exchange.begin(5, frame(5).signature)
    with pytest.raises(Disagreement):
        exchange.recv(1, monotonic() + 10.0)
    assert (other.released, exchange.releasing) == (1, None)


def test_an_early_frame_that_is_taken_back_raises_link_ended() -> None:
    exchange = impatient(Links(Marking(1, [5], [], late=1), TakenBack(2, [], [frame(5)])))
    exchange.begin(5, frame(5).signature)
    with pytest.raises(LinkEnded):
        exchange.recv(1, monotonic() + 10.0)
    assert exchange.releasing == 2
