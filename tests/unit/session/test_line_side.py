"""What a session tells the training thread about a line that runs without this worker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import errors
from paceline._links.base import Peer
from paceline._session.line_messages import LineClient, LineMessage, MemberInbox, Runs
from paceline.config import Config
from pacelinepb.v1 import session_pb2 as pb

PEERS = [Peer(rank, f"m{rank}", "host", "host:1", 1, "") for rank in range(2)]


class Lists:
    """Answers as it is told."""

    def __init__(self, *answers: list[Peer] | errors.PacelineError) -> None:
        self._answers = iter(answers)

    async def fetch(self, *_: Any) -> list[Peer]:
        answer = next(self._answers)
        if isinstance(answer, errors.PacelineError):
            raise answer
        return answer


def heard(lists: Lists) -> list[LineMessage | None]:
    """The messages that follow from the news of a line with two members, of which rank 0 has ended."""
    inbox = MemberInbox()

    async def hear() -> None:
        begun: list[Coroutine[Any, Any, None]] = []
        nothing: Any = None
        side: Any = LineClient("job", Config(), nothing, inbox, begun.append, lambda _: None)
        side.members = lists
        side.control = SimpleNamespace(channel=None)
        side.hear(pb.SessionResponse(running=pb.Running(generation=7, world_size=2, pages=1, ended=[0])))
        for work in begun:
            await asyncio.wait_for(work, 5.0)

    asyncio.run(hear())
    messages: list[LineMessage | None] = []
    while (message := inbox.get(0.0)) is not None:
        messages.append(message)
    return messages


@pytest.mark.parametrize("trouble", [errors.OperationTimeout("no answer"), errors.CoordinatorUnreachable("busy")])
def test_a_member_list_that_cannot_be_had_is_asked_for_again(trouble: errors.PacelineError) -> None:
    """Nobody tells a candidate twice: without the list it would never come in."""
    assert heard(Lists(trouble, PEERS)) == [Runs(7, None), Runs(7, PEERS[1:])]


def test_a_generation_that_is_past_is_asked_for_once() -> None:
    assert heard(Lists(errors.StaleGeneration("generation 8 runs"))) == [Runs(7, None)]


def test_what_may_be_lost_with_a_stream_is_said_again() -> None:
    """Without the end of the line a worker that comes later would wait for members that are gone."""
    sent: list[pb.SessionRequest] = []
    thread: Any = SimpleNamespace(loop=SimpleNamespace(call_soon_threadsafe=lambda call: call()))
    side: Any = LineClient("job", Config(), thread, MemberInbox(), lambda _: None, lambda _: None)
    side.control = SimpleNamespace(generation=7, send=lambda _: None, send_again=sent.extend)
    side.meet(pb.Meet(generation=7))
    side.finish(7, 40)
    side.say_again()
    assert [message.WhichOneof("event") for message in sent] == ["meet", "finish"]
    sent.clear()
    side.hear(pb.SessionResponse(finished=pb.Finished(step=40)))
    side.forget_meeting()
    side.say_again()
    assert sent == []
