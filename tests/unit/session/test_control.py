"""Which generations a member has heard of, and how it introduces itself when it comes back as a new one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from paceline._base.addresses import CoordinatorAddresses
from paceline._session.control import ControlStream
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline_protocol.messages import Message, Spare, ViewFormed
from pacelinepb.v1 import session_pb2 as pb


def test_re_registration_carries_the_former_member_id_and_token() -> None:
    nothing: Any = None

    async def main() -> None:
        stream = ControlStream(
            CoordinatorAddresses.parse("127.0.0.1:9"), pb.Register(job="job"), Config(), nothing, nothing, IN_THE_CLEAR
        )
        stream.generation = 7
        for number in (1, 2):
            stream.registered = pb.Registered(member_id=f"m{number}", session_token=b"token-%d" % number)
            said = stream._register_again().register
            assert (said.job, said.former_member_id) == ("job", f"m{number}")
            assert said.former_session_token == b"token-%d" % number
            assert said.generation_floor == 7, "what it has seen counts for ever"
        await stream.channel.close()

    asyncio.run(main())


def test_a_spare_keeps_the_highest_generation_it_has_heard_of() -> None:
    """A coordinator whose stored state is older learns the number when the member resumes its session."""
    heard: list[Message] = []
    listener: Any = SimpleNamespace(on_message=heard.append)
    nothing: Any = None

    async def main() -> list[int]:
        stream = ControlStream(
            CoordinatorAddresses.parse("127.0.0.1:9"), pb.Register(job="job"), Config(), listener, nothing, IN_THE_CLEAR
        )
        generations = []
        for said in (
            pb.SessionResponse(view_formed=pb.ViewFormed(generation=7)),
            pb.SessionResponse(spare=pb.Spare(generation=9)),
            pb.SessionResponse(spare=pb.Spare(generation=8)),
        ):
            stream._hand_on(said)
            generations.append(stream.generation)
        await stream.channel.close()
        return generations

    assert asyncio.run(main()) == [7, 9, 9]
    assert list(map(type, heard)) == [ViewFormed, Spare, Spare]
