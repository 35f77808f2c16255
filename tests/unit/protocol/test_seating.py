"""Which part a seat has, what is lacking, and who sits where so that little moves."""

import pytest

from paceline_protocol import OURS, JobSettings, Meet, Process, Share, Tag, share_of
from paceline_protocol import share_of as share_of_member
from paceline_protocol._seating import seated
from paceline_protocol._values import lacking
from paceline_protocol.coordinator import Session

BASE = Tag(6, 4)


def shares(text: str) -> tuple[Share, ...]:
    """ "0/2 1/2": two shares."""
    return tuple(Share(*map(int, share.split("/"))) for share in text.split())


def who(name: str, held: str, tag: Tag = BASE) -> Session:
    """Whose host is the name's first letter's, if that is a capital; else it has one of its own."""
    met = Meet(7, tag, True, shares=shares(held))
    process = Process(name[0] if name[0].isupper() else name, 1)
    return Session(name, b"", process, "", JobSettings(1, 9, 3.0), None, 0, 0, 1, 0.0, 0.0, OURS, met=met)


@pytest.mark.parametrize(
    ("world", "node_size", "expected"),
    [
        (3, 1, "0/1 0/1 0/1"),
        (3, 0, "0/3 1/3 2/3"),
        (4, 2, "0/2 1/2 0/2 1/2"),
        (1, 0, "0/1"),
    ],
)
def test_the_share_of_a_seat_follows_rank_world_and_node_size(world: int, node_size: int, expected: str) -> None:
    assert tuple(share_of(rank, world, node_size) for rank in range(world)) == shares(expected)
    assert tuple(share_of_member(rank, world, node_size) for rank in range(world)) == shares(expected)


@pytest.mark.parametrize(
    ("there", "lacks"),
    [
        ("", "0/1"),
        ("0/1", ""),
        ("0/2", "1/2"),
        ("0/2 1/2 0/2", ""),
        ("0/3 2/3", "1/3"),
        ("0/2 1/3 2/3", "1/2"),  # of the cut that lacks least, the first that is named
        ("0/4 1/2", "0/2"),  # shares of two cuts are not put together
    ],
)
def test_lacking_finds_the_missing_shares(there: str, lacks: str) -> None:
    found, missing = lacking(shares(there)), shares(lacks)
    assert found.missing == len(missing)
    if lacks:
        assert [Share(part, found.parts) for part in found.first] == list(missing)


def test_lacking_names_only_the_first_missing_parts() -> None:
    found = lacking(shares("1/4294967295 2/4294967295"))
    assert (found.missing, found.first) == (2**32 - 3, (0, 3, 4, 5, 6, 7, 8, 9))


@pytest.mark.parametrize(
    ("staying", "incoming", "node_size", "most", "seats"),
    [
        ({"a": "0/1", "b": "0/1"}, {"c": "0/1"}, 1, 9, "a b c"),  # whole: the order in which they are
        ({"a": "1/2", "b": "0/2"}, {}, 0, 9, "b a"),  # each keeps its part
        ({"a": "0/2", "b": "1/2", "c": "1/2"}, {}, 2, 9, "a b"),  # cut to the size of a node: one is spare
        ({"a": "0/2", "b": "0/2", "c": "1/2"}, {}, 2, 9, "a c"),  # whoever has what is wanted stays
        ({"a": "0/2", "b": "0/2"}, {}, 2, 9, "a b"),  # one of them takes another part
        ({"a": "0/2", "b": "1/2"}, {"c": "0/1", "d": "0/2"}, 2, 9, "a b d c"),
        ({"a": "0/3", "b": "1/3", "c": "2/3"}, {"d": "0/1"}, 0, 3, "a b c"),  # no more than a view takes
        ({"a": "0/2"}, {}, 2, 9, ""),
    ],
)
def test_seats_are_assigned_so_that_members_keep_their_parts(
    staying: dict[str, str], incoming: dict[str, str], node_size: int, most: int, seats: str
) -> None:
    old, new = ([who(*item) for item in each.items()] for each in (staying, incoming))
    assert " ".join(session.member_id for session in seated(old, new, BASE, node_size, most)) == seats


@pytest.mark.parametrize(
    ("staying", "incoming", "node_size", "most", "seats"),
    [
        ("A0 B0 A1 B1", "", 2, 9, "A0 A1 B0 B1"),  # nobody holds a part: each host makes up a node
        ("A0 B0 B1 C0", "", 2, 9, "B0 B1 A0 C0"),
        ("A0 B0 B1", "", 2, 9, "B0 B1"),  # who is spare is alone on its host
        ("A0 B0", "A1 B1", 2, 9, "A0 A1 B0 B1"),
        ("A0 A1 A2 B0 B1 B2 C0 C1", "", 4, 9, "A0 A1 A2 B0 B1 B2 C0 C1"),  # side by side they have different parts
        ("A0 B0 A1 B1", "", 0, 9, "A0 A1 B0 B1"),  # one copy: a ring leaves each host once
        ("A0:0/2 B0:0/2 B1:1/2", "", 2, 9, "B0 B1"),  # the node that is whole stays
        ("A0:0/2 B0:0/2 B1:1/2", "C0 A1", 2, 9, "B0 B1 A0 A1"),  # whose host has a seat to fill, not who came first
        ("B0:0/2 B1:1/2", "A0:0/2 A1", 2, 9, "B0 B1 A0 A1"),
        ("A0:0/2 B0:1/2", "A1 B1", 2, 9, "A0 B0 B1 A1"),  # nobody moves, and no host has all copies of a part
        ("A0:0/2 A1:0/2 B0:1/2 B1:1/2", "", 2, 9, "A0 B0 A1 B1"),  # so it came: it is not moved for that
        ("A0:0/2 B0:0/2", "C0:1/2 B1:1/2", 2, 9, "A0 C0 B0 B1"),  # newcomers with a part come home too
    ],
)
def test_members_of_one_host_share_a_node(staying: str, incoming: str, node_size: int, most: int, seats: str) -> None:
    old, new = ([who(name, held or "0/1") for name, _, held in (item.partition(":") for item in each.split())]
                for each in (staying, incoming))  # fmt: skip
    assert " ".join(session.member_id for session in seated(old, new, BASE, node_size, most)) == seats


def test_members_share_a_node_if_they_can_share_memory() -> None:
    """Whatever their hosts are called."""
    group = [who(name, "0/1") for name in ("A0", "A1", "A2", "A3")]
    for session, node in zip(group, "xyxy", strict=True):
        session.process = Process("A", 1, node=node)
    assert [session.member_id for session in seated(group, [], BASE, 2, 9)] == ["A0", "A2", "A1", "A3"]


def test_a_promised_seat_is_kept() -> None:
    """Whoever has taken its part first does not send others to and fro."""
    group = [who("a", "0/1"), who("b", "1/2"), who("c", "0/1"), who("d", "0/1")]
    for rank, session in enumerate([group[0], group[2], group[3], group[1]]):
        session.promised = (BASE, 4, rank)
    assert [session.member_id for session in seated(group, [], BASE, 2, 9)] == ["a", "c", "d", "b"]
    for session in group:
        session.promised = (BASE, 6, 5)  # another world
    assert [session.member_id for session in seated(group, [], BASE, 2, 9)] == ["a", "b", "c", "d"]


def test_a_newcomers_promised_seat_yields_to_staying_members() -> None:
    new = who("new", "0/1")
    new.promised = (BASE, 2, 0)
    seats = seated([who("a", "0/1"), who("b", "0/1")], [new], BASE, 2, 2)
    assert [session.member_id for session in seats] == ["a", "b"]


def test_a_part_of_another_state_gives_no_claim_to_a_seat() -> None:
    old = [who("a", "1/2", Tag(5, 1)), who("b", "1/2")]
    assert [session.member_id for session in seated(old, [], BASE, 0, 9)] == ["a", "b"]
