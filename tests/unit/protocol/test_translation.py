"""Each message is read as it was written, and what a member says is checked."""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import get_args

import pytest
from google.protobuf.duration_pb2 import Duration

from paceline_protocol import WHOLE, Meet, Member, Process, Share, Tag, Verdict
from paceline_protocol.coordinator import BadRequest
from paceline_protocol.messages import (
    BarrierFailed,
    BarrierPassed,
    CatchUp,
    Dismissed,
    Drain,
    Finished,
    MemberList,
    Message,
    Mismatch,
    Missing,
    Running,
    Spare,
    StateLost,
    Summons,
    ViewFormed,
    Waiting,
)
from paceline_protocol.translation import read_meet, read_message, write_meet, write_message
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.errors_pb2 import ErrorReason

PROCESS = Process("host-a", 11, "boot", 5, 7, "node")
MEMBER = Member(2, "m2", PROCESS, "host-a:1")
LIST = MemberList(7, 3, b"hash", 2)
LOST = ErrorReason.ERROR_REASON_PEER_LOST
MESSAGES: tuple[Message, ...] = (
    Waiting("for 2 more workers"),
    ViewFormed(LIST, 1, Tag(6, 40), (2,), "steps 41 to 50 are lost", 9),
    ViewFormed(LIST, 1, Tag(0, 0), (), "", 9),
    ViewFormed(LIST, 1, None, (), "", 9),
    Verdict(7, LOST, (1, 2), 12, "rank 1 died"),
    Running(LIST, (0, 2)),
    Summons(7),
    CatchUp(7, Tag(6, 40), ((MEMBER, (Share(0, 2), Share(1, 2))), (MEMBER, ())), Share(1, 2), b"print"),
    CatchUp(0, Tag(0, 0), (), None),
    Mismatch(MEMBER),
    Missing((PROCESS, Process("host-a", 12))),
    Drain("the host goes down"),
    Dismissed(last=True),
    Spare("no seat", 8),
    StateLost("part 1 of 2"),
    Finished(40),
    BarrierPassed(3),
    BarrierFailed(3, LOST, "rank 1 died", (1,)),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    written = write_message(message).SerializeToString()
    assert read_message(pb.SessionResponse.FromString(written)) == message


def test_all_messages_and_fields_are_translated() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))
    told = pb.SessionResponse.DESCRIPTOR.fields_by_name
    for message in MESSAGES:
        name = write_message(message).WhichOneof("event")
        assert name is not None
        assert told[name].message_type.name == type(message).__name__, "one word for both"
        if isinstance(message, ViewFormed | Running):  # their list is a value of its own
            continue
        assert {field.name for field in fields(message)} == {field.name for field in told[name].message_type.fields}, (
            name
        )


def test_session_only_events_are_not_read_as_messages() -> None:
    alone = {"registered", "left", "new_door_secret", "asked", "alive"}
    known = {write_message(message).WhichOneof("event") for message in MESSAGES}
    assert alone | known == {field.name for field in pb.SessionResponse.DESCRIPTOR.oneofs_by_name["event"].fields}
    for name in alone:
        response = pb.SessionResponse()
        getattr(response, name).SetInParent()
        assert read_message(response) is None


def test_a_view_without_a_version_is_read_as_version_8() -> None:
    told = read_message(pb.SessionResponse(view_formed=pb.ViewFormed(generation=7)))
    assert isinstance(told, ViewFormed)
    assert told.version == 8


@pytest.mark.parametrize(
    "meet",
    [
        Meet(0, None, False),
        Meet(7, Tag(0, 0), True, fingerprint=b"print", manifest=b"hash"),
        Meet(7, Tag(6, 40), True, leaving=True, closed=True, unproven=True, step_timeout=2.5),
        Meet(7, Tag(6, 40), True, node_size=0, shares=(Share(1, 2), Share(0, 2)), prepared=Tag(7, 41)),
        Meet(0, Tag(6, 40), False, node_size=2, shares=(), stored=True),
    ],
)
def test_a_meet_is_read_as_it_was_written(meet: Meet) -> None:
    assert read_meet(pb.Meet.FromString(write_meet(meet).SerializeToString())) == meet


def meet(*shares: tuple[int, int]) -> pb.Meet:
    return pb.Meet(node_size=0, shares=[pb.Share(part=part, parts=parts) for part, parts in shares])


def test_shares_are_read() -> None:
    assert read_meet(pb.Meet()).shares == (WHOLE,)
    assert read_meet(meet()).shares == ()
    assert read_meet(meet((2, 3), (0, 1))).shares == (Share(2, 3), Share(0, 1))
    assert read_meet(meet((65535, 65536))).node_size == 0


def test_the_step_timeout_of_a_meet_is_read() -> None:
    assert read_meet(pb.Meet()).step_timeout == inf
    assert read_meet(pb.Meet(step_timeout=Duration(seconds=2, nanos=500_000_000))).step_timeout == 2.5


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (meet((3, 3)), "the part of a share must be below the number of parts"),
        (meet((0, 0)), "the part of a share must be below the number of parts"),
        (meet((0, 2), (0, 65537)), "and that at most 65536"),
        (pb.Meet(prepared=pb.Tag(generation=1 << 62)), r"tag.generation must be below 2\^62"),
        (pb.Meet(step_timeout=Duration(seconds=-1)), "meet.step_timeout must be a duration of 0 s or more"),
    ],
)
def test_an_invalid_meet_raises_bad_request(message: pb.Meet, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read_meet(message)
