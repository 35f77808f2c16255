"""A member's answer about its stacks is checked before it is shown."""

from __future__ import annotations

import json

import pytest

from pacelinepb import MOST_PIDS
from pacelinepb.debug.gathered import Answered
from pacelinepb.debug.stack_answers import neighbours, process_of, processes_by, read_stacks_answer, stacks_as_dict
from pacelinepb.v1.session_pb2 import Member, ProcessIdentity

MEMBER = Member(member_id="m1", rank=2, process=ProcessIdentity(host="host-b", pid=4711))


def answered(data: bytes = b"", trouble: str = "", *, in_view: bool = True) -> Answered:
    return Answered(MEMBER, in_view, data, trouble, 1.0, 2.0)


def test_an_answer_is_read_and_written_as_json() -> None:
    text = 'Current thread 0x01 (most recent call first):\n  File "t.py", line 12 in step\n'
    answer = answered(json.dumps({"stacks": [{"text": text, "trouble": ""}]}).encode())
    assert stacks_as_dict(process_of(answer), answer) == {
        "rank": 2, "member_id": "m1", "host": "host-b", "pid": 4711,
        "threads": [{"main": True, "library": False, "frames": ["t.py:12 in step"]}], "trouble": "",
    }  # fmt: skip


def test_frames_of_paceline_are_one_in_the_short_form() -> None:
    frames = ["site-packages/paceline/a.py", "site-packages/paceline/b.py", "train.py"]
    text = "".join(f'  File "/{file}", line 1 in f\n' for file in frames)
    answer = answered(json.dumps({"stacks": [{"text": f"Current thread 0x01:\n{text}", "trouble": ""}]}).encode())
    (thread,) = stacks_as_dict(process_of(answer), answer)["threads"]
    assert thread["frames"] == [f"/{file}:1 in f" for file in frames]
    assert thread["short"] == ["in paceline: f ... f (2 frames)", "/train.py:1 in f"]


def test_a_member_in_no_view_has_no_rank() -> None:
    answer = answered(trouble="is not connected", in_view=False)
    process = process_of(answer)
    assert (process.rank, process.label) == (None, "member m1 (host-b, pid 4711)")
    assert process.trouble == "is not connected"
    (process,) = processes_by("digits", [answer], None)
    assert process.trouble == (
        "is not connected, nor does another member of its host: run paceline debug stacks digits on host-b (pid 4711), "
        "as the user of the job"
    )


def at(host: str, pid: int, namespace: int = 1) -> Member:
    process = ProcessIdentity(host=host, pid=pid, boot_id=f"boot of {host}" if host else "", pid_namespace=namespace)
    return Member(member_id=f"{host}-{pid}", process=process)


def test_each_host_has_one_member_that_signals_its_neighbours() -> None:
    silent = [Answered(member, True, b"", "is silent", 1.0, 2.0) for member in (at("a", 1), at("b", 2), at("a", 3))]
    silent += [Answered(at("a", 9, namespace=2), True, b"", "is in another container", 1.0, 2.0)]
    silent += [Answered(at("", 5), True, b"", "does not say where it is", 1.0, 2.0)]
    found = neighbours(silent, [at("c", 7), at("a", 4), at("a", 6), at("", 8)])
    assert [(helper and helper.member_id, [each.member.process.pid for each in of]) for helper, of in found] == [
        ("a-4", [1, 3]),
        (None, [2]),
        (None, [9]),
        (None, [5]),
    ]


def test_members_of_a_host_with_many_silent_ones_take_turns() -> None:
    silent = [Answered(at("a", pid), True, b"", "is silent", 1.0, 2.0) for pid in range(1, 2 * MOST_PIDS + 2)]
    found = neighbours(silent, [at("a", 900), at("a", 901)])
    assert [(helper and helper.member_id, len(of)) for helper, of in found] == [
        ("a-900", MOST_PIDS),
        ("a-901", MOST_PIDS),
        ("a-900", 1),
    ]


def test_a_neighbour_answers_for_several() -> None:
    silent = [answered(trouble="is silent"), answered(trouble="is silent")]
    text = 'Current thread 0x01 (most recent call first):\n  File "t.py", line 12 in step\n'
    said = {"stacks": [{"text": text, "trouble": ""}, {"text": "", "trouble": "the process has ended"}]}
    first, second = processes_by("digits", silent, answered(json.dumps(said).encode()))
    assert (first.stacks[0].frames, first.trouble) == (("t.py:12 in step",), "")
    assert second.trouble == "is silent; the process has ended"
    (silent_too, _) = processes_by("digits", silent, answered(trouble="has not answered within 5.0 s"))
    assert silent_too.trouble == "is silent; has not answered within 5.0 s"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"stacks": []}', b'{"stacks": [{"text": 1, "trouble": ""}]}', b"[" * 100_000, b"\xff"]
)
def test_an_answer_that_is_none_is_said_to_be_unreadable(data: bytes) -> None:
    assert read_stacks_answer(data, 0) == ("", "gave an answer that cannot be read")
