"""What fails too often in a row ends in an error that has every cause, unless those to blame have left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline._elastic.attempts import MAX_ATTEMPTS, FailedAttempts
from paceline._links.base import Peer
from paceline.errors import CollectiveMismatch, OperationTimeout, PeerLost, StepVoid

WORLD = [Peer(rank, f"member-{rank}", f"host-{rank}", pid=100 + rank) for rank in range(7)]


def test_failed_attempts_are_counted_per_step() -> None:
    failures = FailedAttempts()
    assert failures.begin("step 4", WORLD) == 1
    failures.add("step 4", PeerLost("rank 1 died"), WORLD)
    assert failures.begin("step 4", WORLD) == 2
    assert failures.begin("step 5", WORLD) == 1, "the next step has failed never"
    assert failures.begin("step 4", WORLD) == 1, "a line that goes on from before begins anew"


def test_too_many_failed_attempts_raise_step_void() -> None:
    failures = FailedAttempts()
    for number in range(MAX_ATTEMPTS - 1):
        assert failures.begin("step 4", WORLD) == number + 1
        failures.add("step 4", PeerLost(f"rank {number} died"), WORLD)
    failures.begin("step 4", WORLD)
    failures.add("step 4", ValueError("no"), WORLD)
    with pytest.raises(StepVoid, match=r"step 4 failed 5 times in a row: PeerLost: rank 0 died; .*ValueError: no"):
        failures.begin("step 4", WORLD)


def test_failures_of_different_steps_do_not_add_up() -> None:
    failures = FailedAttempts()
    for step in range(2 * MAX_ATTEMPTS):
        failures.begin(f"step {step}", WORLD)
        failures.add(f"step {step}", PeerLost("rank 1 died"), WORLD)


def test_failures_caused_by_departed_workers_do_not_raise_step_void() -> None:
    """Machines are reclaimed one by one while one long step is tried again and again."""
    failures = FailedAttempts()
    left = list(WORLD)
    for number in range(6):
        assert failures.begin("step 4", left) == number + 1
        failures.add("step 4", PeerLost("it died", ranks=(left[-1].rank,)), left)
        left.pop()
    assert failures.begin("step 4", left) == 7


def test_a_restarted_container_counts_as_another_worker() -> None:
    """Its host has the same name, and its first process the same id."""
    failures = FailedAttempts()
    for number in range(2 * MAX_ATTEMPTS):
        world = [*WORLD[:6], replace(WORLD[6], pid=1, start_ticks=1_000 * number + 7)]
        assert failures.begin("step 4", world) == number + 1
        failures.add("step 4", PeerLost("it died", ranks=(6,)), world)


def test_failures_of_a_process_that_keeps_rejoining_raise_step_void() -> None:
    """It is a new member at another rank then, and the same process."""
    failures = FailedAttempts()
    for number in range(MAX_ATTEMPTS):
        world = [*WORLD[:6], replace(WORLD[6], member_id=f"again-{number}")]
        failures.begin("step 4", world)
        failures.add("step 4", OperationTimeout("too late", ranks=(6,)), world)
    with pytest.raises(StepVoid):
        failures.begin("step 4", world)


def test_calls_that_did_not_match_are_known_of_the_last_attempt() -> None:
    failures = FailedAttempts()
    failures.add("step 8", CollectiveMismatch("other calls"), [])
    assert failures.mismatch_in("step 8") == "other calls"
    assert failures.mismatch_in("step 7") == ""
    failures.add("step 8", PeerLost("a peer was lost"), [])
    assert failures.mismatch_in("step 8") == ""
    failures.add("step 8", CollectiveMismatch("other calls"), [])
    failures.begin("step 8", [])
    assert failures.mismatch_in("step 8") == "", "the next attempt may succeed"
