"""What a member's port says to the coordinator, and whom it asks if it can reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline._elastic import job_line
from paceline._elastic.job_line import JobLine
from paceline._links.base import Peer
from paceline._session.inbox import MemberInbox, ReachResult
from paceline.config import Config
from paceline_protocol import Meet, Tag
from paceline_protocol.translation import write_meet

ONE, TWO = (Peer(rank, f"m{rank}", f"host-{rank}") for rank in range(2))


class Connection:
    """`MemberConnection`, for a test that runs on the loop itself."""

    job, group, member_id, credentials, knocker = "job", None, "m9", None, None

    def __init__(self) -> None:
        self.inbox = MemberInbox()
        self.said: list[Meet] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.line = SimpleNamespace(meet=self.said.append)

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.tasks.append(asyncio.ensure_future(work()))


@pytest.mark.parametrize("node_size", [1, 0])
def test_meet_of_a_candidate_says_that_its_links_are_unproven(node_size: int) -> None:
    connection = Connection()
    of_port = JobLine(connection, Config())  # type: ignore[arg-type]
    meet = Meet(0, Tag(2, 5), False, leaving=True, node_size=node_size, unproven=True)
    of_port.meet(meet)
    assert [write_meet(said).unproven for said in connection.said] == [True]


def test_a_new_reach_test_cancels_the_pending_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members end one after the other, each a list of its own: tries that nobody waits for must not pile up."""

    async def try_both() -> MemberInbox:
        began = asyncio.Event()

        async def out_of_reach(_job: str, members: Sequence[Peer], *_: object) -> list[str]:
            if TWO in members:
                began.set()
                await asyncio.Event().wait()  # it does not answer
            return []

        monkeypatch.setattr(job_line, "out_of_reach", out_of_reach)
        connection = Connection()
        of_port = JobLine(connection, Config())  # type: ignore[arg-type]
        of_port.try_to_reach([ONE, TWO])
        await began.wait()
        of_port.try_to_reach([ONE])
        await asyncio.wait(connection.tasks, timeout=5)
        assert [task.cancelled() for task in connection.tasks] == [True, False]
        return connection.inbox

    inbox = asyncio.run(try_both())
    assert inbox.get(0) == ReachResult([ONE], [])
    assert inbox.get(0) is None
