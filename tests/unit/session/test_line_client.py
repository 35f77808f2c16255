"""What a session tells the training thread about a line that runs without this worker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import errors
from paceline._links.base import Peer
from paceline._session.inbox import InboxMessage, LineMembers, MemberInbox
from paceline._session.line_client import LineClient
from paceline.config import Config
from paceline_protocol import Meet
from paceline_protocol.messages import Finished, MemberList, Running
from pacelinepb.v1 import session_pb2 as pb

PEERS = [Peer(rank, f"m{rank}", "host", "host:1", 1, "") for rank in range(2)]
RUNNING = Running(MemberList(7, 2, b"", 1), (0,))


class Lists:
    """Answers as it is told."""

    side: LineClient

    def __init__(self, *answers: list[Peer] | errors.PacelineError) -> None:
        self._answers = iter(answers)

    async def fetch(self, *_: Any) -> list[Peer]:
        answer = next(self._answers)
        if isinstance(answer, errors.PacelineError):
            raise answer
        return answer


def heard(lists: Lists) -> list[InboxMessage | None]:
    """The messages that follow from the news of a line with two members, of which rank 0 has ended."""
    inbox = MemberInbox()

    async def hear() -> None:
        begun: list[Coroutine[Any, Any, None]] = []
        nothing: Any = None
        side: Any = LineClient("job", Config(), nothing, inbox, begun.append, lambda _: None)
        side.members, lists.side = lists, side
        side.control = SimpleNamespace(channel=None)
        side.hear(RUNNING)
        for work in begun:
            await asyncio.wait_for(work, 5.0)

    asyncio.run(hear())
    messages: list[InboxMessage | None] = []
    while (message := inbox.get(0.0)) is not None:
        messages.append(message)
    return messages


@pytest.mark.parametrize("trouble", [errors.OperationTimeout("no answer"), errors.CoordinatorUnreachable("busy")])
def test_a_failed_member_list_fetch_is_retried(trouble: errors.PacelineError) -> None:
    """Nobody tells a candidate twice: without the list it would never come in."""
    assert heard(Lists(trouble, PEERS)) == [RUNNING, LineMembers(PEERS[1:])]


def test_a_member_list_of_a_stale_generation_is_not_retried() -> None:
    assert heard(Lists(errors.StaleGeneration("generation 8 runs"))) == [RUNNING]


def test_a_member_list_that_arrives_after_the_own_view_is_dropped() -> None:
    class Late(Lists):
        async def fetch(self, *_: Any) -> list[Peer]:
            self.side.forget_meeting()
            return PEERS

    assert heard(Late()) == [RUNNING]


def test_meet_and_finish_are_resent_until_superseded() -> None:
    """Without the end of the line a worker that comes later would wait for members that are gone."""
    sent: list[pb.SessionRequest] = []
    thread: Any = SimpleNamespace(loop=SimpleNamespace(call_soon_threadsafe=lambda call: call()))
    side: Any = LineClient("job", Config(), thread, MemberInbox(), lambda _: None, lambda _: None)
    side.control = SimpleNamespace(generation=7, send=lambda _: None, send_again=sent.extend)
    side.meet(Meet(7, None, False))
    side.finish(7, 40)
    side.say_again()
    assert [message.WhichOneof("event") for message in sent] == ["meet", "finish"]
    sent.clear()
    side.hear(Finished(40))
    side.forget_meeting()
    side.say_again()
    assert sent == []
