"""Meetings of members that hold a state between them: what is there, what is waited for, what is lost, who sits."""

from dataclasses import replace

import pytest
from unit.protocol.meeting import BASE, SILENT, SURE, job, names

from paceline_protocol import OURS, Meet, Process, Share, Tag, Verdict
from paceline_protocol._meeting import Meeting, convene
from paceline_protocol._orders import Orders
from paceline_protocol._policy import decide
from paceline_protocol.coordinator import (
    ExitReported,
    JobState,
    MetOthers,
    Send,
    Session,
    Standing,
)
from paceline_protocol.messages import CatchUp, Dismissed, StateLost
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent
from support.counted_lines import lines_of

NEXT = Tag(7, 5)
VOID = Verdict(7, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 1, "rank 1 died")


def part(text: str, tag: Tag | None = BASE, *, node_size: int = 0, **how: object) -> Meet:
    """ "1/3 0/1": what a member holds, the live share first."""
    shares = tuple(Share(*map(int, share.split("/"))) for share in text.split())
    return replace(Meet(7, tag, True, shares=shares, node_size=node_size), **how)  # type: ignore[arg-type]


def candidate(state: JobState, met: Meet, name: str = "new", **how: object) -> Session:
    """Somebody who is in no view, and says what it brings."""
    settings = state.view.settings  # type: ignore[union-attr]
    session = Session(name, b"", Process(name, 1), "", settings, None, 0, 99, 1, 0.0, 0.0, OURS, **how)  # type: ignore[arg-type]
    session.met = replace(met, generation=0, holds_base=False)
    state.sessions[name] = session
    return session


def targets(meeting: Meeting) -> dict[str, str]:
    return {name: f"{share.part}/{share.parts}" for name, share in meeting.targets.items()}


def test_the_shares_of_all_members_together_form_the_base() -> None:
    meeting = convene(job([part("0/2"), part("1/2")]))
    assert (names(meeting.members), meeting.base, meeting.newcomers) == ("m0 m1", BASE, ())


def test_a_tag_with_a_missing_part_waits_for_a_silent_member() -> None:
    meeting = convene(job([part("0/3", NEXT), part("1/3", NEXT), SILENT]))
    assert not meeting.over
    assert meeting.reason == (
        "generation 7 cannot go on: part 2 of 3 is missing; rank 2 (host-2, pid 1) is silent and may hold the job's "
        "state; if you know that it has ended, run: paceline restart job"
    )


def test_a_state_is_lost_when_all_holders_of_a_part_have_ended() -> None:
    meeting = convene(job([part("0/3"), part("1/3"), SURE]))
    assert (meeting.over, names(meeting.lost)) == (True, "m0 m1")
    assert meeting.reason == (
        "part 2 of 3 of the state of step 4 is lost with rank 2 (host-2), which was killed by SIGKILL"
    )


@pytest.mark.parametrize("same", [True, False], ids=["one state", "a state of each"])
def test_cost_of_a_lost_state_grows_linearly_with_the_members(same: bool) -> None:
    """Each could name a state of its own: 600 members had the coordinator compare 360,000 pairs at each word of one."""

    def lines(count: int) -> int:
        state = job([part(f"{each}/5000", Tag(7, 5 + (0 if same else each))) for each in range(count)] + [SURE] * count)
        assert len(convene(state).lost) == count
        return lines_of(lambda: convene(state))

    assert lines(400) < 4.5 * lines(100)


def test_a_returning_member_that_may_hold_a_part_is_waited_for() -> None:
    state = job([part("0/2"), SURE])
    candidate(state, part("1/2"), came_back=True).met = None
    meeting = convene(state)
    assert not meeting.over
    assert meeting.reason.endswith(
        "part 1 of 2 is missing; waiting for new to report what it holds; if it hangs, end its process (pid 1 on new)"
    )


def test_a_candidate_with_a_missing_part_becomes_a_donor() -> None:
    state = job([part("0/2"), SURE])
    candidate(state, part("1/2", unproven=True))
    meeting = convene(state)
    assert names(meeting.donors) == "m0 new"
    assert (targets(meeting), names(meeting.laggards)) == ({"m0": "0/1"}, "m0"), "it has yet to show its links"


def test_an_older_complete_state_is_the_base_if_the_newest_is_lost() -> None:
    state = job([part("0/2 0/3", NEXT), part("1/2", BASE), part("0/2", BASE), SURE])
    assert convene(state).base == BASE


def test_holders_of_a_complete_state_are_not_lost_with_the_rest() -> None:
    """A new line may begin with it."""
    state = job([part("0/2", NEXT), SURE])
    candidate(state, part("0/2", Tag(5, 1)), "first")
    candidate(state, part("1/2", Tag(5, 1)), "second")
    candidate(state, part("1/2", Tag(4, 1)), "third")
    candidate(state, part("", Tag(3, 1), stored=True), "fourth")
    meeting = convene(state)
    assert (meeting.over, names(meeting.lost)) == (True, "m0 third")


def test_a_state_is_declared_lost_only_after_members_had_time_to_return() -> None:
    state = job([part("0/2"), SURE])
    state.last_arrival = 10.0
    decision = decide(12.0, state, 0.2)
    assert (decision.meeting, decision.again_at) == (None, 13.0)
    assert decision.reason.endswith("unless they come back soon")
    assert decide(13.0, state, 0.2).meeting is not None


def test_a_prepared_member_finishes_a_step_that_others_applied() -> None:
    meeting = convene(job([part("0/2", NEXT), part("1/2", prepared=NEXT)]))
    assert (meeting.base, names(meeting.donors), names(meeting.laggards), targets(meeting)) == (NEXT, "m0", "m1", {})
    assert meeting.reason == "waiting for rank 1 (host-1) to finish step 5"


def test_a_prepared_step_that_no_member_applied_is_undone() -> None:
    meeting = convene(job([part("0/2", prepared=NEXT), part("1/2", prepared=NEXT)]))
    assert (meeting.base, names(meeting.members)) == (BASE, "m0 m1")


def test_a_prepared_member_finishes_its_copies_too() -> None:
    meeting = convene(job([part("0/3 1/3", NEXT), part("1/3 2/3", prepared=NEXT), SURE]))
    assert (meeting.base, names(meeting.donors), names(meeting.laggards)) == (NEXT, "m0", "m1")


def test_a_leaving_member_stays_until_the_others_have_its_part() -> None:
    members = [part("0/3"), part("1/3", leaving=True), part("2/3")]
    meeting = convene(job(members))
    assert (names(meeting.members), names(meeting.dismissed)) == ("", "")
    assert (targets(meeting), names(meeting.laggards)) == ({"m0": "0/2", "m2": "1/2"}, "m0 m2")
    members[0], members[2] = part("0/2 0/3"), part("1/2 2/3")
    meeting = convene(job(members))
    assert (names(meeting.members), names(meeting.dismissed)) == ("m0 m2", "m1")


def test_a_member_without_a_seat_is_spare() -> None:
    nodes = [part("0/2", node_size=2), part("1/2", node_size=2), SURE, part("1/2", node_size=2)]
    meeting = convene(job(nodes))
    assert (names(meeting.members), names(meeting.spares)) == ("m0 m1", "m3")
    assert meeting.reason == "2 members of generation 7 go on; rank 3 (host-3) will be spare"


def test_an_incomplete_node_waits_for_more_workers() -> None:
    """Of a whole node both parts must be there; so one member alone has not the state, unless it has both."""
    meeting = convene(job([part("0/2 1/2", node_size=2), SURE]))
    assert meeting.reason == "waiting for 1 more worker (1 of at least 1, in nodes of 2)"


def test_too_few_members_keep_a_leaver_whose_part_they_lack() -> None:
    meeting = convene(job([part("0/2"), part("1/2", leaving=True)], least=2))
    assert names(meeting.dismissed) == ""
    awaited = "1 more worker (1 of at least 2), which must take over the state of rank 1 (host-1)"
    assert meeting.reason == f"waiting for {awaited}"
    meeting = convene(job([part("0/2 1/2"), part("1/2", leaving=True)], least=2))
    assert names(meeting.dismissed) == "m1"


@pytest.mark.parametrize(
    ("void", "members", "dismissed"),
    [
        (False, "", "m0 m1"),  # they write a checkpoint together
        (True, "m0 m1", ""),  # they cannot; so there is one more generation, which can
    ],
)
def test_all_leavers_are_dismissed_unless_the_generation_is_void(void: bool, members: str, dismissed: str) -> None:
    state = job([part("0/2", leaving=True), part("1/2", leaving=True)], least=3)
    state.verdict = VOID if void else None
    meeting = convene(state)
    assert (names(meeting.members), names(meeting.dismissed)) == (members, dismissed)


def test_leavers_too_few_for_a_node_are_dismissed() -> None:
    state = job([part("0/2 1/2", node_size=2, leaving=True), SURE])
    state.verdict = VOID
    assert names(convene(state).dismissed) == "m0"


def test_a_line_is_not_over_before_dismissed_members_have_left() -> None:
    """They may be writing a checkpoint, or not have heard of it."""
    state = job([part("0/2", leaving=True), part("1/2", leaving=True)])
    for session in state.sessions.values():
        session.standing = Standing.DISMISSED
    meeting = convene(state)
    assert not meeting.over
    assert meeting.reason == "waiting for rank 0 (host-0), rank 1 (host-1) to leave"


def test_each_member_reads_its_part_of_a_checkpoint() -> None:
    stored = [part("", BASE, stored=True, holds_base=False) for _ in range(2)]
    meeting = convene(job(stored, base=None))
    assert (targets(meeting), names(meeting.laggards)) == ({"m0": "0/2", "m1": "1/2"}, "m0 m1")


def test_a_job_does_not_begin_at_step_0_if_a_later_state_is_known() -> None:
    """One has read its part of a checkpoint; the other cannot, and has what everyone begins with."""
    reads, blind = part("0/2", BASE, holds_base=False), part("0/1", Tag(0, 0), holds_base=False)
    meeting = convene(job([reads, blind], base=None))
    assert (meeting.over, names(meeting.lost), meeting.members) == (True, "m0", ())
    assert meeting.reason.startswith("part 1 of 2 of the state of step 4 is lost with")
    meeting = convene(job([replace(reads, shares=(), stored=True), blind], base=None))
    assert (meeting.base, meeting.over) == (BASE, False), "who finds it on the disk again leads"


# What the membership makes of it --------------------------------------------------------------------------------------


def in_view(least: int, *shares: str) -> tuple[PureJob, list[str]]:
    """A job whose generation 2 starts from (0, 0), each member with its share."""
    job = PureJob()
    members = [job.join(least, 9) for _ in shares]
    job.pass_time(0.3)
    for member, held in zip(members, shares, strict=True):
        job.do(MetOthers(member, part(held, Tag(0, 0), generation=1, holds_base=False)))
    assert job.state.generation == 2
    return job, members


def says(member: str, held: str, **how: object) -> MetOthers:
    return MetOthers(member, part(held, Tag(2, 1), generation=2, **how))


def test_members_that_all_leave_write_a_checkpoint_together() -> None:
    job, (first, second) = in_view(2, "0/2", "1/2")
    job.do(says(first, "0/2", leaving=True))
    effects = job.do(says(second, "1/2", leaving=True))
    assert sent(effects, Dismissed) == [
        (first, Dismissed(last=True)),
        (second, Dismissed(last=True)),
    ]


def test_a_member_that_leaves_alone_writes_no_checkpoint() -> None:
    """Of a spread state it has but a part; the others, who have all, wait for more workers."""
    job, (first, second) = in_view(2, "0/2 0/1", "1/2 0/1")
    job.do(says(first, "0/2 0/1"))
    assert Send(second, Dismissed(last=False)) in job.do(says(second, "1/2", leaving=True))
    job.cut(second)
    assert Send(second, Dismissed(last=False)) in job.resume(second, 2)


def test_a_member_of_a_lost_state_receives_the_reason() -> None:
    job, (first, _) = in_view(1, "0/2", "1/2")
    job.do(ExitReported(Process("host-2", 1002), -9))
    job.pass_time(4.0, beating=[first])
    effects = job.do(says(first, "0/2"))
    ((member_id, lost),) = sent(effects, StateLost)
    assert member_id == first
    assert lost.reason.startswith("part 1 of 2 of the state of step 1 is lost with rank 1 (host-2), which was killed")


def test_a_generation_is_above_that_of_its_checkpoint() -> None:
    """A coordinator that is new counts from 1: its steps would be older than the state that they come from."""
    fresh = PureJob()
    members = [fresh.join(2, 4) for _ in range(2)]
    fresh.pass_time(0.3)
    first = fresh.state.generation
    assert first < 7
    for member in members:
        fresh.do(MetOthers(member, Meet(first, Tag(7, 100), False, node_size=1)))
    view = fresh.state.view
    assert view is not None
    assert (view.base, view.generation) == (Tag(7, 100), 8)


def test_a_prepared_member_is_ordered_once_to_finish_with_its_own_share() -> None:
    state = job([part("0/2", NEXT), part("1/2", prepared=NEXT), part("0/2", prepared=NEXT), part("1/2", NEXT)])
    state.verdict = VOID
    orders, decision = Orders(state), decide(0.0, state, 0.2)
    told = sent(orders.give(0.0, decision), CatchUp)
    assert {member_id: order.share for member_id, order in told} == {"m1": Share(1, 2), "m2": Share(0, 2)}
    finished = state.sessions["m1"]
    finished.met, finished.catching_up = part("1/2", NEXT), False
    assert orders.give(0.0, decide(0.0, state, 0.2)) == [], "there is one more who has it, which changes nothing"


@pytest.mark.parametrize(("node_size", "waited_for"), [(2, True), (1, False)])
def test_a_silent_spare_is_waited_for_only_if_the_state_is_sharded(node_size: int, waited_for: bool) -> None:
    line = PureJob()
    members = [line.join(2, 4) for _ in range(3)]
    line.pass_time(0.3)
    spare = line.state.sessions[members[2]]
    spare.standing, spare.rank = Standing.CANDIDATE, None
    spare.met = replace(part("1/2", node_size=node_size), generation=0)
    line.cut(members[2])
    line.pass_time(60.0, beating=members[:2])
    assert members[2] not in line.state.sessions
    assert (line.now - line.state.last_arrival < 1.0) == waited_for


def test_newcomers_wait_while_members_take_their_shares() -> None:
    """Each would have the state cut anew, and what was taken for the cut before would pile up."""
    state = job([part("0/2"), part("1/2")])
    candidate(state, part("0/1", Tag(0, 0)), "new")
    first = convene(state)
    assert targets(first) == {"m0": "0/3", "m1": "1/3", "new": "2/3"}
    Orders(state).give(0.0, decide(0.0, state, 0.2))
    candidate(state, part("0/1", Tag(0, 0)), "late")
    assert targets(convene(state)) == targets(first)
    del state.sessions["new"]
    assert targets(convene(state)) == {"m0": "0/3", "m1": "1/3", "late": "2/3"}, "it is cut anew anyhow"


def test_seats_are_promised_to_leaving_members_too() -> None:
    """All leave a generation that has failed: they stay for one in which they can write, whoever comes meanwhile."""
    state = job([part("0/1", leaving=True), part("0/1", leaving=True)])
    state.verdict = VOID
    assert targets(convene(state)) == {"m0": "0/2", "m1": "1/2"}
    Orders(state).give(0.0, decide(0.0, state, 0.2))
    candidate(state, part("0/1", Tag(0, 0)), "late")
    assert targets(convene(state)) == {"m0": "0/2", "m1": "1/2"}
