"""A member takes no message of a coordinator that leads no longer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from paceline._base.addresses import CoordinatorAddresses
from paceline._session import control
from paceline._session.control import ControlStream
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from pacelinepb.v1 import session_pb2 as pb


def test_lower_epochs_are_refused_and_the_highest_is_kept() -> None:
    async def main() -> list[bool]:
        nothing: Any = None
        addresses = CoordinatorAddresses.parse("127.0.0.1:9")
        stream = ControlStream(addresses, pb.Register(job="job"), Config(), nothing, nothing, IN_THE_CLEAR)
        try:
            return [stream._is_current(pb.SessionResponse(epoch=epoch)) for epoch in (0, 3, 3, 2, 0, 4, 3, 4)]
        finally:
            await stream.channel.close()

    assert asyncio.run(main()) == [True, True, True, False, False, True, False, True]


class Stream:
    """A stream whose messages arrive when the test says so."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()

    async def read(self) -> pb.SessionResponse | None:
        return await self.messages.get()


def test_a_stalled_member_does_not_time_out_a_healthy_stream() -> None:
    """The message comes in some rounds of the loop after the time was up."""

    async def main() -> None:
        stream: Any = Stream()
        loop = asyncio.get_running_loop()

        def stall() -> None:
            time.sleep(0.1)
            loop.call_later(0.01, stream.messages.put_nowait, pb.SessionResponse(epoch=3))

        loop.call_soon(stall)
        message = await control._next_message(stream, 0.05)
        assert message is not None
        assert message.epoch == 3
        stream.messages.put_nowait(None)
        assert await control._next_message(stream, 0.05) is None

    asyncio.run(main())


def test_a_silent_coordinator_raises_timeout_error() -> None:
    async def main() -> None:
        stream: Any = Stream()
        with pytest.raises(TimeoutError):
            await control._next_message(stream, 0.01)
        stream.messages.put_nowait(pb.SessionResponse(epoch=3))
        assert await control._next_message(stream, None) == pb.SessionResponse(
            epoch=3
        )  # nobody else waits for a message

    asyncio.run(main())
