"""Who is parted with over a broken link, and who is not, for it may be the last that holds the state."""

from __future__ import annotations

from unit.protocol.test_meeting import elastic

from paceline_protocol import Meet, Tag
from paceline_protocol.coordinator import EndSession, MetOthers, Send, Standing
from paceline_protocol.messages import Dismissed, Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent

LOST = ErrorReason.ERROR_REASON_PEER_LOST


def ended(effects: list[object]) -> list[str]:
    return [effect.member_id for effect in effects if isinstance(effect, EndSession)]


def test_a_member_that_two_others_lost_is_evicted_but_may_return() -> None:
    job, (first, second, odd) = elastic(3)
    job.report(first, LOST, 2)
    effects = job.report(second, LOST, 2) + job.pass_time(5.0, [first, second, odd])
    assert ended(effects) == [odd]
    assert job.state.endings[2].how == "was cut off from others"
    assert not job.state.endings[2].sure, "it may come back with the state"


def with_newcomers() -> tuple[PureJob, list[str]]:
    """Generation 3 starts from step 1 with a member of generation 2 and two newcomers."""
    job, (old,) = elastic(1)
    new = [job.join(1, 9), job.join(1, 9)]
    for member in new:
        job.do(MetOthers(member, Meet(0, Tag(0, 0), False)))
    job.do(MetOthers(old, Meet(2, Tag(2, 1), True)))
    assert job.state.live is not None
    assert (job.state.live.generation, job.state.live.newcomers) == (3, (1, 2))
    return job, [old, *new]


def test_the_only_possible_state_holder_stays_although_all_accuse_it() -> None:
    job, members = with_newcomers()
    job.report(members[1], LOST, 0)
    effects = job.report(members[2], LOST, 0) + job.pass_time(5.0, members)
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (0,)
    assert ended(effects) == []
    assert members[0] in job.state.sessions


def test_a_possible_state_holder_stays_while_the_other_is_disconnected() -> None:
    """Those may be dead: then the line would wait for them for ever, and the state was here."""
    job, (first, second) = elastic(2)
    new = [job.join(1, 9), job.join(1, 9)]
    for member in new:
        job.do(MetOthers(member, Meet(0, Tag(0, 0), False)))
    for member in (first, second):
        job.do(MetOthers(member, Meet(2, Tag(2, 1), True)))
    assert job.state.live is not None
    assert job.state.live.newcomers == (2, 3)
    job.cut(second)
    for member in new:
        job.report(member, LOST, 0)
    effects = job.pass_time(0.2)
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (0,)
    assert ended(effects) == []


def test_a_newcomer_that_two_others_lost_is_evicted() -> None:
    job, members = with_newcomers()
    job.report(members[0], LOST, 2)
    effects = job.report(members[1], LOST, 2) + job.pass_time(5.0, members)
    assert ended(effects) == [members[2]]


def test_link_loss_after_the_verdict_evicts_only_a_disconnected_member() -> None:
    job, (first, second, third, fourth) = elastic(4)
    job.report(first, LOST, 3)
    effects = job.report(second, LOST, 3) + job.pass_time(5.0, [first, second, third, fourth])
    assert ended(effects) == [fourth]
    assert job.state.sessions[third].standing is Standing.VOID
    assert ended(job.report(first, LOST, 2)) == [], "the links of a generation that is over end one after the other"
    job.cut(third)
    assert ended(job.report(first, LOST, 2)) == [third]


def test_the_last_leaver_does_not_wait_for_a_member_dismissed_earlier() -> None:
    """It keeps no state, and may be there for long: what the last ones do together would wait for it."""
    job, (first, second) = elastic(2, least=2)
    job.do(MetOthers(first, Meet(2, Tag(2, 3), True, leaving=True)))
    effects = job.do(MetOthers(second, Meet(2, Tag(2, 3), True)))
    assert Send(first, Dismissed(False)) in effects
    effects = job.do(MetOthers(second, Meet(2, Tag(2, 3), True, leaving=True)))
    told = [message for member_id, message in sent(effects, Verdict | Dismissed) if member_id == second]
    assert [type(message) for message in told] == [Verdict, Dismissed]
    assert told[1] == Dismissed(True)
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (0,)


def test_members_that_leave_together_are_all_dismissed_as_last() -> None:
    job, (first, second) = elastic(2)
    job.do(MetOthers(first, Meet(2, Tag(2, 3), True, leaving=True)))
    effects = job.do(MetOthers(second, Meet(2, Tag(2, 3), True, leaving=True)))
    assert {Send(first, Dismissed(True)), Send(second, Dismissed(True))} <= set(effects)
    assert job.state.verdict is None
