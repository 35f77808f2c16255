"""A member hands each message of the coordinator to the part of the session that it concerns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline._session.first_view import FirstView
from paceline._session.inbox import MemberInbox
from paceline._session.line_client import LineClient
from paceline._session.member import MemberConnection
from paceline.config import Config
from paceline_protocol import Meet
from paceline_protocol.messages import MemberList, ViewFormed, Waiting


def make_member(sent_again: list[Any]) -> MemberConnection:
    """A member without a door; `sent_again` gets the messages that a new stream to the coordinator would repeat."""
    thread: Any = SimpleNamespace(loop=SimpleNamespace(call_soon_threadsafe=lambda call: call()))
    coordinators: Any = "127.0.0.1:7400"
    stream: Any = SimpleNamespace(generation=7, send=lambda _: None, send_again=sent_again.extend)
    member: Any = MemberConnection.__new__(MemberConnection)
    member.job = "job"
    member.inbox = MemberInbox()
    member.first_view = FirstView("job", coordinators)
    member.generations = SimpleNamespace(formed=lambda _: None)
    member.line = LineClient("job", Config(), thread, member.inbox, lambda _: None, lambda _: None)
    member.line.control = stream
    member._start = lambda work: work.close()
    found: MemberConnection = member
    return found


def test_a_view_ends_the_meeting_that_led_to_it() -> None:
    """A meeting that is repeated after a reconnect would stop the generation that has just formed."""
    sent_again: list[Any] = []
    member = make_member(sent_again)
    member.line.meet(Meet(7, None, False))
    member.line.say_again()
    assert [request.WhichOneof("event") for request in sent_again] == ["meet"]
    sent_again.clear()
    member.on_message(ViewFormed(MemberList(8, 2, b"", 1), 0))
    member.line.say_again()
    assert sent_again == []


def test_a_repeated_reason_to_wait_is_reported_once() -> None:
    member = make_member([])
    for reason in ("1 of 2 workers", "1 of 2 workers", "the donor answers"):
        member.on_message(Waiting(reason))
    reasons = [member.inbox.get(0.0) for _ in range(3)]
    assert reasons == [Waiting("1 of 2 workers"), Waiting("the donor answers"), None]
