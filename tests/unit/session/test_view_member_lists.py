"""The member list of the next view: what has changed since the last one, where the coordinator knows that one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline import errors
from paceline._session.view import MemberLists
from paceline_protocol import OURS, JobSettings, Process, Seat, View
from paceline_protocol.messages import MemberList
from paceline_server.pages import ViewPages
from pacelinepb.v1 import session_pb2 as pb

SETTINGS = JobSettings(1, 5_000, 3.0)


def seat(number: int) -> Seat:
    return Seat(0, f"m{number}", Process(f"host-{number}", number), f"host-{number}:1", b"token", number)


def view(generation: int, numbers: list[int]) -> View:
    seats = tuple(replace(seat(number), rank=rank) for rank, number in enumerate(numbers))
    return View(generation, SETTINGS, False, seats, OURS)


class Coordinator:
    """Answers GetView as the dispatcher does.

    Attributes:
        sent: bytes of its answers.
        spoil: changes an answer on its way.
    """

    def __init__(self, page_members: int = 1_000) -> None:
        self.page_members = page_members
        self.pages: ViewPages | None = None
        self.sent: list[int] = []
        self.spoil: Callable[[bytes], bytes] = lambda page: page

    def forms(self, numbers: list[int]) -> MemberList:
        generation = self.pages.view.generation + 1 if self.pages is not None else 1
        self.pages = ViewPages.of(view(generation, numbers), 0, self.page_members, self.pages)
        return self.pages.announced

    async def call(self, make: Callable[[Any], Awaitable[bytes]]) -> bytes:
        return await make(self)

    def unary_unary(self, path: str, request_serializer: Callable[[Any], bytes]) -> Callable[..., Awaitable[bytes]]:
        async def answer(request: pb.GetViewRequest, **_: Any) -> bytes:
            assert self.pages is not None
            page = self.pages.page(request.page, request.known_sha256)
            assert page is not None
            self.sent.append(len(page))
            return self.spoil(page)

        return answer


def fetch(lists: MemberLists, coordinator: Coordinator, formed: MemberList) -> list[str]:
    coordinator.sent.clear()
    peers = asyncio.run(lists.fetch(coordinator, "job", formed, 1.0))  # type: ignore[arg-type]
    assert [peer.rank for peer in peers] == list(range(len(peers)))
    assert all(peer.host == f"host-{peer.member_id[1:]}" for peer in peers)
    return [peer.member_id for peer in peers]


@pytest.mark.parametrize(
    "after",
    [
        [*range(500), *range(501, 1_500)],
        [*range(1_500), 2_000, 2_001],
        [*range(100), 3_000, *range(200, 1_500)],
        [*reversed(range(1_500))],
    ],
    ids=["one went", "two came", "one for a hundred", "turned round"],
)
def test_a_member_of_the_previous_view_gets_only_the_changes(after: list[int]) -> None:
    coordinator, lists = Coordinator(), MemberLists()
    assert len(fetch(lists, coordinator, coordinator.forms(list(range(1_500))))) == 1_500
    assert len(coordinator.sent) == 2
    assert fetch(lists, coordinator, coordinator.forms(after)) == [f"m{number}" for number in after]
    assert len(coordinator.sent) == 1
    assert coordinator.sent[0] < (150 if after[0] == 0 else 15_000)


def test_a_known_member_list_is_not_fetched_again() -> None:
    """A candidate is told of the running view again whenever one of its members ends."""
    coordinator, lists = Coordinator(), MemberLists()
    formed = coordinator.forms(list(range(1_500)))
    fetch(lists, coordinator, formed)
    assert len(fetch(lists, coordinator, formed)) == 1_500
    assert len(fetch(lists, coordinator, coordinator.forms(list(range(1_500))))) == 1_500
    assert coordinator.sent == []


def test_a_view_without_common_members_is_sent_page_by_page() -> None:
    coordinator, lists = Coordinator(page_members=3), MemberLists()
    fetch(lists, coordinator, coordinator.forms([1, 2, 3]))
    assert fetch(lists, coordinator, coordinator.forms([4, 5, 6, 7, 8, 9, 10])) == [f"m{n}" for n in range(4, 11)]
    assert len(coordinator.sent) == 3, "more than a page has changed: it is sent whole, and each page once"


def test_a_member_that_missed_a_view_gets_the_full_list() -> None:
    coordinator, lists = Coordinator(page_members=2), MemberLists()
    fetch(lists, coordinator, coordinator.forms([1, 2, 3, 4]))
    coordinator.forms([1, 2, 3])
    assert fetch(lists, coordinator, coordinator.forms([1, 2, 3, 5])) == ["m1", "m2", "m3", "m5"]
    assert len(coordinator.sent) == 2


def test_changes_include_a_member_with_a_new_address() -> None:
    before = view(1, [1, 2])
    moved = replace(before.seats[1], address="host-9:9")
    pages = ViewPages.of(replace(before, seats=(before.seats[0], moved)), 0, 10, ViewPages.of(before, 0, 10))
    assert [m.address for s in pb.GetViewResponse.FromString(pages.changes).stretches for m in s.members] == [
        "host-9:9"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        pb.GetViewResponse(stretches=[pb.Stretch(first=0, count=1)]),
        pb.GetViewResponse(stretches=[pb.Stretch(first=1, count=2**32 - 1)]),
        pb.GetViewResponse(stretches=[pb.Stretch(count=3)] * 1_000),
    ],
    ids=["another list", "beyond the list", "enormous"],
)
def test_invalid_changes_fall_back_to_the_full_list_or_raise(changes: pb.GetViewResponse) -> None:
    coordinator, lists = Coordinator(), MemberLists()
    fetch(lists, coordinator, coordinator.forms([1, 2, 3]))
    formed = coordinator.forms([1, 3])
    coordinator.spoil = lambda page: changes.SerializeToString() if len(coordinator.sent) == 1 else page
    assert fetch(lists, coordinator, formed) == ["m1", "m3"]
    coordinator.spoil = lambda page: changes.SerializeToString()
    with pytest.raises(errors.PacelineError, match="member list of generation 3"):
        fetch(lists, coordinator, coordinator.forms([3]))
