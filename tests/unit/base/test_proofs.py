"""The key of members' doors: who proves what, once."""

from __future__ import annotations

import random

from paceline._base.proofs import WINDOW, DoorKey
from pacelinepb.v1 import peer_pb2

SECRET = bytes(range(32))
REQUEST = peer_pb2.KnockRequest(job="job", from_member="a", to_member="b")
NAME, DATA = "KnockRequest", REQUEST.SerializeToString()


def key(member_id: str, secret: bytes = SECRET, **limits: int) -> DoorKey:
    made = DoorKey(**limits)
    made.learn(secret, member_id)
    return made


def test_a_proof_is_accepted_only_once() -> None:
    caller, door = key("a"), key("b")
    proof = caller.prove(REQUEST)
    assert door.check(NAME, DATA, proof) == ""
    assert door.check(NAME, DATA, proof) == "this call was made before"
    assert door.check(NAME, DATA, caller.prove(REQUEST)) == ""


def test_forged_and_misdirected_proofs_are_refused() -> None:
    door, proof = key("b"), key("a").prove(REQUEST)
    other = peer_pb2.KnockRequest(job="job", from_member="a", to_member="c").SerializeToString()
    for name, data, shown in [
        (NAME, DATA, None),
        (NAME, DATA, b""),
        (NAME, DATA, proof[:20]),
        (NAME, DATA, proof + b"x" * 64),
        (NAME, DATA, key("a", bytes(32)).prove(REQUEST)),  # of another job
        (NAME, DATA, proof + b"2"),  # as another caller
        (NAME, DATA, b"\1" + proof[1:]),  # with another number
        (NAME, other, proof),  # to another door
        ("GetStateRequest", DATA, proof),  # for another purpose
    ]:
        assert door.check(name, data, shown).startswith("the caller does not prove that it belongs to this job")
    assert door.check(NAME, DATA, proof) == ""  # which none of that has used up


def test_every_proof_is_refused_before_the_key_has_a_secret() -> None:
    proof = key("a", b"").prove(REQUEST)
    assert DoorKey().check(NAME, DATA, proof) == "this worker is not registered yet"


def test_reordered_calls_are_accepted_once_within_the_window() -> None:
    """Against a set of all numbers, with the door's window in mind."""
    chance = random.Random(7)
    caller, door = key("a"), key("b")
    proofs = dict(enumerate((caller.prove(REQUEST) for _ in range(4 * WINDOW)), 1))
    seen: set[int] = set()
    for _ in range(4000):
        number = max(1, min(len(proofs), max(seen, default=0) + chance.randint(-WINDOW - 50, 60)))
        good = number not in seen and number > max(seen, default=0) - WINDOW
        assert (door.check(NAME, DATA, proofs[number]) == "") is good
        seen.add(number)


def test_the_number_of_remembered_callers_is_bounded() -> None:
    door = key("b", max_callers=3)
    callers = [key(f"a{n}") for n in range(5)]
    assert [door.check(NAME, DATA, caller.prove(REQUEST)) for caller in callers] == [""] * 5
    assert len(door._seen) == 3
    for _ in range(10):
        assert door.check(NAME, DATA, key("c", bytes(32)).prove(REQUEST))  # a stranger takes no place
    assert b"a4" in door._seen


def test_a_proof_by_the_previous_secret_is_refused() -> None:
    caller, door = key("a"), key("b")
    proof = caller.prove(REQUEST)
    door.learn(bytes(32), "b")
    assert door.check(NAME, DATA, proof)
    caller.learn(bytes(32), "a")
    assert door.check(NAME, DATA, caller.prove(REQUEST)) == ""


def test_repr_hides_the_secret() -> None:
    assert repr(key("a")) == "DoorKey(...)"


def test_a_used_proof_stays_used_after_the_secret_changes_back() -> None:
    caller, door = key("a"), key("b")
    proof = caller.prove(REQUEST)
    assert door.check(NAME, DATA, proof) == ""
    door.learn(bytes(32), "b")
    door.learn(SECRET, "b")
    assert door.check(NAME, DATA, proof) == "this call was made before"
