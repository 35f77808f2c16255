"""A member that waits says what for, and since when."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline._elastic import waiting
from paceline._elastic.mates import ALONE
from paceline._links.base import Peer
from paceline._links.fault import Fault, Suspicion
from paceline.config import Config
from paceline.errors import Dismissed
from paceline_protocol import Meet, MemberState, Phase, Tag
from pacelinepb.v1.errors_pb2 import ErrorReason


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def member(draining: str = "", generation: int = 1, said: list[Meet] | None = None) -> waiting.MeetingWait:
    port: Any = SimpleNamespace(
        inbox=SimpleNamespace(draining=draining, connected=True),
        group=SimpleNamespace(_core=SimpleNamespace(mesh=SimpleNamespace(fault=Fault(generation, 0, 0.0)))),
        config=Config(step_timeout=60.0, failure_timeout=3.0),
        mates=ALONE,
    )
    place = MemberState(Tag(0, 0))
    place.generation = generation
    return waiting.MeetingWait(port, place, ([] if said is None else said).append)


def test_a_draining_member_announces_leaving_once(clock: SimpleNamespace) -> None:
    said: list[Meet] = []
    waits = member("SIGTERM", 3, said)
    waits.poll()
    waits.poll()
    assert [meet.leaving for meet in said] == [True]


@pytest.mark.parametrize("has_come_in", [False, True])
def test_a_draining_candidate_without_state_is_dismissed_at_once(has_come_in: bool, clock: SimpleNamespace) -> None:
    said: list[Meet] = []
    waits = member("SIGTERM", 0, said)
    if not has_come_in:
        waits.as_candidate()
    with pytest.raises(Dismissed, match="SIGTERM"):
        waits.poll()
    assert said == []


@pytest.mark.parametrize("has_come_in", [False, True])
def test_a_draining_candidate_announces_its_state_and_leaving_once(has_come_in: bool, clock: SimpleNamespace) -> None:
    """Nobody else may have that state. It was a member that was about to leave, and its session ended."""
    said: list[Meet] = []
    waits = member("SIGTERM", 2, said)
    waits._member.held, waits._member.leaving = Tag(2, 5), True
    waits._member.cast_out()
    if not has_come_in:
        waits.as_candidate()
    waits.poll()
    waits.poll()
    assert [(meet.generation, meet.tag, meet.leaving, meet.unproven) for meet in said] == [
        (0, Tag(2, 5), True, not has_come_in)
    ]


def test_a_candidate_does_not_wait_for_the_answer_of_an_ended_member(clock: SimpleNamespace) -> None:
    """It takes seconds. Meanwhile the coordinator says that this one need not be reached."""
    said: list[Meet] = []
    tried: list[Sequence[Peer]] = []
    waits = member("", 0, said)
    waits._job_line.try_to_reach = tried.append  # type: ignore[method-assign]
    waits.as_candidate()
    one, two = (Peer(rank, f"m{rank}", f"host-{rank}") for rank in range(2))
    waits.line_runs([one, two])
    waits.poll()
    waits.line_runs([one])
    waits.poll()
    assert tried == [[one, two], [one]]
    waits.tried(tried[0], ["rank 1 does not answer"])
    assert said == []
    waits.tried(tried[1], [])
    assert len(said) == 1


def test_a_candidate_logs_the_pause_before_the_next_reach_test(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    waits, one = member("", 0), [Peer(0, "m0", "host-0")]
    waits._job_line.try_to_reach = lambda _: None  # type: ignore[method-assign]
    waits.as_candidate()
    waits.line_runs(one)
    waits.poll()
    waits.tried(one, ["rank 0 does not answer"])
    (text,) = caplog.messages
    assert re.fullmatch(r"cannot join the other members, trying again in 0\.[2-5] s: rank 0 does not answer", text), (
        "the first pause is shorter than a second, and no pause is none"
    )


def test_a_long_wait_logs_its_reason_once(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    waits = member()
    waits.said()
    waits.waits_for("waiting for rank 1 to stop")
    for _ in range(8):
        clock.now += 0.5
        waits.poll()
    assert caplog.messages == ["waiting for rank 1 to stop; for 2 s now"]


def test_a_silent_coordinator_is_logged_as_the_reason_of_the_wait(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    waits = member()
    clock.now += 60.0  # it trained meanwhile: that was no wait
    waits.said()
    clock.now += 2.0
    waits.poll()
    assert caplog.messages == ["the coordinator has not answered yet; for 2 s now"]
    waits.waits_for("waiting for rank 1 to stop")
    clock.now += 0.5
    waits.poll()
    assert caplog.messages[1:] == ["waiting for rank 1 to stop; for 0 s now"]


def test_a_planned_meeting_longer_than_step_timeout_is_a_timeout(clock: SimpleNamespace) -> None:
    """A member hangs between two steps, and no collective is there to time out."""
    waits = member()
    suspicions: list[Suspicion] = []
    fault: Fault = waits._job_line.group._core.mesh.fault
    fault.on_suspicion(suspicions.append)
    waits.planned = True
    waits.said()
    waits.waits_for("waiting for rank 1 (host-b) to stop")
    clock.now += 59.0
    waits.poll()
    assert not fault.failed
    clock.now += 2.0
    waits.poll()
    waits.poll()
    (suspicion,) = suspicions
    assert suspicion.reason == ErrorReason.ERROR_REASON_TIMEOUT
    assert suspicion.text == "the members did not meet within 60 s: waiting for rank 1 (host-b) to stop"


def test_reach_tests_end_when_a_view_comes(clock: SimpleNamespace) -> None:
    """It came into a view while it still tried to reach the members of a line that was over by then."""
    waits = member()
    waits.as_candidate()
    waits.line_runs([])
    waits.view_came()
    waits.poll()
    assert waits._reach is None


@pytest.mark.parametrize("failed", [False, True])
def test_only_a_healthy_generation_continues_without_the_coordinator(failed: bool, clock: SimpleNamespace) -> None:
    """A step has asked for a meeting, and it does not come about. A generation that has failed is not gone on with."""
    waits, went_on = member(), []
    port: Any = waits._job_line
    if failed:
        lost = Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 1, 0, "rank 1 is gone")
        port.group._core.mesh.fault.suspect(lost)
    port.go_on = lambda: went_on.append(clock.now)
    waits.planned, waits._member.holds_base = True, True
    port.inbox.connected = False
    for _ in range(8):
        waits.poll()
        clock.now += 0.5
    assert went_on == ([] if failed else [103.5])
    assert (waits._member.phase is Phase.READY) == (not failed)


def test_a_rank_of_a_replica_waits_for_the_coordinator(clock: SimpleNamespace) -> None:
    """Its mates might not go on with the generation."""
    waits = member()
    port: Any = waits._job_line
    port.mates = SimpleNamespace(size=2)
    waits.planned, waits._member.holds_base = True, True
    port.inbox.connected = False
    for _ in range(8):
        waits.poll()
        clock.now += 0.5
    assert waits._member.phase is Phase.MEETING
