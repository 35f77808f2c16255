"""Questions to members without a socket: what is held at one time, and that everybody is released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paceline_server.errors import Draining
from paceline_server.questions import Answer, Questions
from paceline_server.settings import ServerSettings
from pacelinepb.v1 import session_pb2 as pb

RECORDS = pb.Asked(what=pb.QUESTION_RECORDS)
LONG = 60.0


class Members:
    """Who has been asked, and in which question."""

    def __init__(self, settings: ServerSettings) -> None:
        self.asked: dict[str, int] = {}
        self.news = asyncio.Event()
        self.questions = Questions(settings, self._push)

    def _push(self, member_id: str, message: pb.SessionResponse) -> bool:
        self.asked[member_id] = message.asked.ask
        self.news.set()
        return not member_id.startswith("away")

    async def until_asked(self) -> None:
        """Returns once the members of a question have been asked, which happens in one go."""
        await self.news.wait()

    def answer(self, member_id: str, data: bytes = b"{}") -> asyncio.Task[bool]:
        return asyncio.create_task(self.questions.answer(member_id, self.asked[member_id], data))


def within_a_second(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 10.0))


def test_ending_a_question_releases_all_pending_answers() -> None:
    """Planted: without the release at the end of a question, the calls of members last for ever."""

    async def main() -> None:
        members = Members(ServerSettings())
        answers = members.questions.ask("job", RECORDS, ["a", "b", "c"], LONG, LONG)
        first = asyncio.ensure_future(anext(answers))
        await members.until_asked()
        calls = [members.answer(each) for each in "abc"]
        assert (await first).member_id == "a"
        assert not calls[0].done(), "an answer is taken once it was passed on"
        await answers.aclose()
        assert await asyncio.gather(*calls) == [False, False, False]
        assert not members.questions._open
        assert not members.questions._of_job

    within_a_second(main)


def test_an_answer_is_accepted_once_it_is_passed_on() -> None:
    async def main() -> None:
        members = Members(ServerSettings())
        found = []
        async for answer in members.questions.ask("job", RECORDS, ["a", "b", "away"], LONG, LONG):
            found.append((answer.member_id, answer.data, answer.trouble))
            if len(found) == 1:
                calls = [members.answer("a", b"A"), members.answer("b", b"B")]
        assert found == [("away", None, "is not connected"), ("a", b"A", ""), ("b", b"B", "")]
        assert await asyncio.gather(*calls) == [True, True]

    within_a_second(main)


def test_members_left_at_the_timeout_are_reported_with_a_reason() -> None:
    async def main() -> None:
        members = Members(ServerSettings(memory_bytes=64 << 20))  # one at one time
        found = []
        async for answer in members.questions.ask("job", RECORDS, ["a", "b", "c"], LONG, 0.2):
            found.append((answer.member_id, answer.data, answer.trouble))
        assert found[0] == ("a", None, "has not answered within 0.2 s")
        assert found[1:] == [(each, None, "was not asked within 0.2 s: ask fewer at a time") for each in "bc"]
        assert list(members.asked) == ["a"]

    within_a_second(main)


@pytest.mark.parametrize("most", [1, 16])
def test_the_number_of_members_asked_at_once_is_limited(most: int) -> None:
    settings = ServerSettings() if most > 1 else ServerSettings(memory_bytes=64 << 20)
    ids = [f"m{number}" for number in range(40)]

    async def main() -> None:
        members = Members(settings)
        held: list[int] = []
        seen: list[Answer] = []

        async def answer_all() -> None:
            answered: set[str] = set()
            while len(answered) < len(ids):
                new = set(members.asked) - answered
                held.append(len(members.asked) - len(seen))
                calls = [members.answer(each) for each in new]
                answered |= new
                await asyncio.gather(*calls)
                await asyncio.sleep(0)

        answering = asyncio.create_task(answer_all())
        async for answer in members.questions.ask("job", RECORDS, ids, LONG, LONG):
            seen.append(answer)
        await answering
        assert sorted(each.member_id for each in seen) == sorted(ids)
        assert 1 <= max(held) <= most

    within_a_second(main)


def test_a_member_that_cancels_its_answer_is_reported_as_hung_up() -> None:
    async def main() -> None:
        members = Members(ServerSettings())
        answers = members.questions.ask("job", RECORDS, ["a", "b"], LONG, LONG)
        first = asyncio.ensure_future(anext(answers))
        await members.until_asked()
        calls = [members.answer("a"), members.answer("b", b"long")]
        await first
        calls[1].cancel()
        await asyncio.wait({calls[1]})
        second = await anext(answers)
        assert (second.data, second.trouble) == (None, "has hung up before its answer was passed on")
        assert await calls[0]

    within_a_second(main)


def test_draining_the_coordinator_ends_open_questions() -> None:
    async def main() -> None:
        members = Members(ServerSettings())
        waiting = asyncio.ensure_future(anext(members.questions.ask("job", RECORDS, ["a"], LONG, LONG)))
        await members.until_asked()
        members.questions.drain(Draining("the coordinator is stopping"))
        with pytest.raises(Draining):
            await waiting

    within_a_second(main)
