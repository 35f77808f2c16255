"""What a member says of its stacks is checked before anybody sees it."""

from __future__ import annotations

import json

import pytest

from pacelinepb.debug.gathered import Answered
from pacelinepb.debug.stack_answers import process_of, read_stacks_answer, run_it_there, stacks_as_dict
from pacelinepb.v1.session_pb2 import Member, ProcessIdentity

MEMBER = Member(member_id="m1", rank=2, process=ProcessIdentity(host="host-b", pid=4711))


def answered(data: bytes = b"", trouble: str = "", *, in_view: bool = True) -> Answered:
    return Answered(MEMBER, in_view, data, trouble, 1.0, 2.0)


def test_an_answer_is_read_and_written_as_json() -> None:
    text = 'Current thread 0x01 (most recent call first):\n  File "t.py", line 12 in step\n'
    answer = answered(json.dumps({"stacks": [{"text": text, "trouble": ""}]}).encode())
    assert stacks_as_dict(process_of(answer), answer) == {
        "rank": 2, "member_id": "m1", "host": "host-b", "pid": 4711,
        "threads": [{"main": True, "frames": ["t.py:12 in step"]}], "trouble": "",
    }  # fmt: skip


def test_a_member_in_no_view_has_no_rank() -> None:
    answer = answered(trouble="is not connected", in_view=False)
    process = process_of(answer)
    assert (process.rank, process.label) == (None, "member m1 (host-b, pid 4711)")
    assert process.trouble == "is not connected"
    assert run_it_there("digits", answer) == (
        "run paceline debug stacks digits on host-b (pid 4711), as the user of the job"
    )


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"stacks": []}', b'{"stacks": [{"text": 1, "trouble": ""}]}', b"[" * 100_000, b"\xff"]
)
def test_an_answer_that_is_none_is_said_to_be_unreadable(data: bytes) -> None:
    assert read_stacks_answer(data, 0) == ("", "gave an answer that cannot be read")
