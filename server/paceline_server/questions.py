"""Questions of operators to members: who is asked when, and which answer goes to which operator.

An answer is part of a call of its member (`AnswerAsk`), which stays open until the answer was passed on. So it lies in
memory only while that call pays for it, and this module stores nothing (decision 26).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from paceline_server.errors import NoRoom, Refused
from paceline_server.settings import ServerSettings
from pacelinepb.v1 import session_pb2 as pb

_MOST_OF_A_JOB, _MOST = 4, 16
"""The most questions at one time, to one job and to all."""

_MOST_AT_ONCE = 16
"""Members that one question waits for at one time."""

_COPIES = 3
"""Copies of an answer in memory while its call is open, as for every request."""

NOT_CONNECTED = "is not connected"


@dataclass(frozen=True, slots=True)
class Answer:
    """A member's answer: its data, or the reason why there is none. Times are seconds on the loop's clock."""

    member_id: str
    data: bytes | None
    trouble: str
    asked_at: float
    answered_at: float


@dataclass(slots=True)
class _Question:
    """A question that is being asked.

    `asked` is when each member was asked whose answer is missing. An answer that `came` has the future that tells its
    call whether it was passed on. `news` is set when something has come.
    """

    asked: dict[str, float] = field(default_factory=dict)
    came: deque[tuple[Answer, asyncio.Future[bool]]] = field(default_factory=deque)
    passing: asyncio.Future[bool] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ended: Refused | None = None


class Questions:
    """All questions that are being asked. `push` sends a message to a member; False if it is not connected."""

    def __init__(self, settings: ServerSettings, push: Callable[[str, pb.SessionResponse], bool]) -> None:
        room = settings.call_bytes // (_MOST * _COPIES * settings.longest_request)
        self._at_once = max(1, min(_MOST_AT_ONCE, room))
        self._push = push
        self._open: dict[int, _Question] = {}
        self._of_job: Counter[str] = Counter()

    async def ask(
        self,
        job: str,
        what: pb.Asked,
        members: Sequence[str],
        patience: float,
        longest: float,
        pids_of: Mapping[str, Sequence[int]] | None = None,
    ) -> AsyncGenerator[Answer, None]:
        """Asks members, and yields one answer of each as they come. A caller that stops early closes the iterator.

        Sets the number of the question, and its `pids` where `pids_of` tells them by member. Waits `patience` seconds
        for each member, and `longest` seconds for all: those that have not answered by then are yielded with that as
        `trouble`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + longest
        with self._one(job) as (number, question):
            todo = deque(members)
            while todo or question.asked or question.came:
                if question.ended is not None:
                    raise question.ended
                while todo and len(question.asked) + len(question.came) < self._at_once:
                    member_id, now = todo.popleft(), loop.time()
                    pids = what.pids if pids_of is None else pids_of.get(member_id, ())
                    message = pb.SessionResponse(asked=pb.Asked(ask=number, what=what.what, pids=pids))
                    if now >= end:
                        trouble = f"was not asked within {longest:g} s: ask fewer at a time"
                        yield Answer(member_id, None, trouble, now, now)
                    elif self._push(member_id, message):
                        question.asked[member_id] = now
                    else:
                        yield Answer(member_id, None, NOT_CONNECTED, now, now)
                if question.came:
                    answer, question.passing = question.came.popleft()
                    yield answer
                    _tell(question.passing, taken=True)
                    continue
                now = loop.time()
                silent = {each: at for each, at in question.asked.items() if now >= min(at + patience, end)}
                for member_id in silent:  # none can answer while this yields
                    del question.asked[member_id]
                for member_id, at in silent.items():
                    yield Answer(member_id, None, f"has not answered within {min(patience, end - at):.1f} s", at, now)
                if question.asked:
                    await _until(question.news, min(min(question.asked.values()) + patience, end))
                    question.news.clear()

    async def answer(self, member_id: str, number: int, data: bytes) -> bool:
        """Hands in a member's answer, and returns when it was passed on; False if nobody waits for it any more."""
        question = self._open.get(number)
        asked_at = question.asked.pop(member_id, None) if question is not None else None
        if question is None or asked_at is None:
            return False
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[bool] = loop.create_future()
        came = (Answer(member_id, data, "", asked_at, loop.time()), taken)
        question.came.append(came)
        question.news.set()
        try:
            return await taken
        except asyncio.CancelledError:  # the member has hung up, so nobody pays for its answer any more
            if came in question.came:
                without = replace(came[0], data=None, trouble="has hung up before its answer was passed on")
                question.came[question.came.index(came)] = (without, taken)
            raise

    def drain(self, reason: Refused) -> None:
        """Ends all questions, because the coordinator stops."""
        for question in self._open.values():
            question.ended = reason
            question.news.set()

    @contextmanager
    def _one(self, job: str) -> Iterator[tuple[int, _Question]]:
        """Counts a question; at its end tells those who have answered too late."""
        if self._of_job[job] >= _MOST_OF_A_JOB or len(self._open) >= _MOST:
            raise NoRoom(
                f"job {job!r} is being asked {self._of_job[job]} questions, and all jobs {len(self._open)}: at most "
                f"{_MOST_OF_A_JOB} and {_MOST} at one time; ask again"
            )
        number, question = secrets.randbits(63), _Question()
        self._open[number] = question
        self._of_job[job] += 1
        try:
            yield number, question
        finally:
            del self._open[number]
            self._of_job[job] -= 1
            if not self._of_job[job]:
                del self._of_job[job]
            for taken in (question.passing, *(taken for _, taken in question.came)):
                _tell(taken, taken=False)


def _tell(future: asyncio.Future[bool] | None, *, taken: bool) -> None:
    if future is not None and not future.done():  # it may be cancelled: the member has hung up
        future.set_result(taken)


async def _until(event: asyncio.Event, deadline: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await event.wait()
    except TimeoutError:
        pass
