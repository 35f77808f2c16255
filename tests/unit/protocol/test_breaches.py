"""Members that break the protocol are parted with, if there are enough witnesses (docs/decisions/06)."""

from __future__ import annotations

import random

import pytest
from unit.protocol.test_meeting import elastic

from paceline_protocol import Meet, Process, Tag
from paceline_protocol.coordinator import Barred, Effect, EndSession, MetOthers
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob

BROKE = ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL
START = Tag(0, 0)


def accuse(job: PureJob, *words: tuple[str, str]) -> list[str]:
    """Members report breaches in the live generation, which ends; returns the members that are parted with."""
    view = job.state.view
    assert view is not None
    rank_of = {seat.member_id: seat.rank for seat in view.seats}
    effects: list[Effect] = []
    for accuser, accused in words:
        effects += job.report(accuser, BROKE, rank_of[accused], f"{accused} sent nonsense")
    effects += job.pass_time(0.2) + job.pass_time(0.02)
    assert job.state.verdict is not None
    return [effect.member_id for effect in effects if isinstance(effect, EndSession)]


def again(job: PureJob, tag: Tag = START) -> None:
    """The members of the last view meet with a state, and begin the next generation."""
    for session in job.state.present():
        job.do(MetOthers(session.member_id, Meet(job.state.generation, tag, True)))
    assert job.state.live is not None


def test_a_member_that_two_others_accuse_is_evicted() -> None:
    job, (first, second, odd) = elastic(3)
    assert accuse(job, (first, odd), (second, odd)) == [odd]
    assert job.state.endings[2].how == "broke the protocol"
    assert not job.state.endings[2].sure, "it may come back with the state"
    again(job)
    assert len(job.state.present()) == 2


def test_one_report_of_a_breach_evicts_no_member() -> None:
    job, (first, _, odd) = elastic(3)
    assert accuse(job, (first, odd), (first, odd)) == []
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (2,)


def test_a_member_that_accuses_itself_is_evicted() -> None:
    job, (_, _, odd) = elastic(3)
    assert accuse(job, (odd, odd)) == [odd]


def test_the_verdict_on_a_breach_waits_for_a_second_witness() -> None:
    job, (first, second, odd) = elastic(3)
    job.report(first, BROKE, 2)
    job.pass_time(0.05)
    assert job.state.verdict is None
    assert accuse(job, (second, odd)) == [odd]


def test_a_second_witness_may_come_after_the_verdict() -> None:
    job, (first, second, odd) = elastic(3)
    assert accuse(job, (first, odd)) == []
    assert accuse(job, (second, odd)) == [odd]


def test_a_second_witness_may_come_in_the_next_attempt_at_the_step() -> None:
    job, (first, second, odd) = elastic(3)
    assert accuse(job, (first, odd)) == []
    again(job)
    assert accuse(job, (second, odd)) == [odd]


def test_accusations_are_forgotten_after_a_completed_step() -> None:
    job, (first, second, odd) = elastic(3)
    assert accuse(job, (first, odd)) == []
    again(job, Tag(2, 1))
    assert accuse(job, (second, odd)) == []


def test_a_lone_accuser_is_evicted_at_its_third_accusation() -> None:
    job, (first, second, odd) = elastic(3)
    for _ in range(2):
        assert accuse(job, (first, odd)) == []
        again(job)
    assert accuse(job, (first, odd)) == [first]
    assert job.state.endings[0].how == "was alone 3 times in saying that others broke the protocol"
    again(job)
    assert accuse(job, (second, odd)) == [odd], "it was right: this is the second witness"


def test_a_breach_between_two_members_evicts_neither() -> None:
    job, (first, second) = elastic(2)
    for _ in range(6):
        assert accuse(job, (first, second)) == []
        again(job)


def test_the_last_member_that_may_hold_the_state_is_not_evicted() -> None:
    job, (old,) = elastic(1)
    new = [job.join(1, 9) for _ in range(2)]
    for member in new:
        job.do(MetOthers(member, Meet(0, START, False)))
    job.do(MetOthers(old, Meet(2, Tag(2, 1), True)))
    assert accuse(job, (new[0], old), (new[1], old)) == []


def test_a_process_evicted_twice_is_barred_from_registering() -> None:
    job, (first, second, odd) = elastic(3)
    assert accuse(job, (first, odd), (second, odd)) == [odd]
    again(job)
    host = "host-3"
    job._count = 2  # the same process
    back = job.join(1, 9, host=host, former=odd)
    job.do(MetOthers(back, Meet(0, START, False)))
    again(job, Tag(3, 1))
    assert accuse(job, (first, back), (second, back)) == [back]
    assert job.state.endings[2].sure, "nobody waits for what it holds"
    job._count = 2
    with pytest.raises(Barred, match=r"\(host-3, pid 1003\) 2 times, because it broke the protocol, and does not take"):
        job.join(1, 9, host=host, former=back)
    assert job.join(1, 9, host=host) == "m4", "another process of that host"
    assert job.state.sessions["m4"].process == Process("host-3", 1004)


@pytest.mark.parametrize("seed", range(30))
def test_false_accusations_by_one_member_evict_only_the_liar(seed: int) -> None:
    chance = random.Random(seed)
    job, members = elastic(4)
    liar = members[chance.randrange(4)]
    for _ in range(8):
        if liar not in job.state.sessions:
            break
        words = [(liar, chance.choice([m for m in members if m != liar])) for _ in range(chance.randint(1, 3))]
        assert set(accuse(job, *words)) <= {liar}
        again(job)
    assert liar not in job.state.sessions
