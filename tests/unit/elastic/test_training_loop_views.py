"""What a member does with the views that come: it refuses some, and some are those of the member it was before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import paceline
from paceline._elastic.attempts import MAX_ATTEMPTS
from paceline._elastic.job_line import SoloLine
from paceline._elastic.saver import Saver
from paceline._elastic.training_loop import TrainingLoop
from paceline._group import Group
from paceline._links.base import Peer
from paceline._links.fault import Suspicion
from paceline._links.local import local_meshes
from paceline._session.inbox import ReachResult, SessionReplaced, ViewLinked
from paceline.config import Config
from paceline.errors import StepVoid
from paceline_protocol import Meet, MemberState, Phase, Tag
from paceline_protocol.messages import MemberList, ViewFormed
from pacelinepb.v1.errors_pb2 import ErrorReason


class TwoPort(SoloLine):
    """A member of a world of two whose coordinator is the test; remembers what it says."""

    def __init__(self) -> None:
        self.meshes = local_meshes(2)
        super().__init__("job", Group(self.meshes[0], Config()), Config())
        self.said: list[Meet] = []
        self.id = "former"

    @property
    def member_id(self) -> str:
        return self.id

    def meet(self, meet: Meet) -> None:
        self.said.append(meet)

    def try_to_reach(self, members: Sequence[Peer]) -> None:
        self.inbox.put(ReachResult(members, []))

    def finish(self, step: int) -> None:
        raise AssertionError("nothing is done here")


def line_that_holds(held: Tag, **parts: Any) -> tuple[TwoPort, TrainingLoop, Any]:
    port = TwoPort()
    state = paceline.TrainState(notes={"seen": np.zeros(1)}, **parts)
    place = MemberState(held)
    return port, TrainingLoop(port, state._core, 9, 0, b"", Saver(None, None), place), place


def view(
    port: TwoPort, generation: int, base: Tag, member_id: str, newcomers: frozenset[int] = frozenset()
) -> ViewLinked:
    port.meshes[0].generation = port.meshes[0].fault.generation = generation
    formed = ViewFormed(MemberList(generation, 2), 0, base, tuple(sorted(newcomers)))
    return ViewLinked(formed, port.meshes[0], member_id)


def test_a_member_that_refuses_a_view_tells_the_others() -> None:
    """They wait for it in the first collective, and would do so for `step_timeout`."""
    port, line, place = line_that_holds(Tag(2, 7))
    suspicions: list[Suspicion] = []
    port.meshes[0].fault.on_suspicion(suspicions.append)
    line._handle(view(port, 3, Tag(2, 5), "former"))
    assert place.phase is Phase.MEETING
    assert [(meet.generation, meet.tag) for meet in port.said] == [(3, Tag(2, 7))]
    (suspicion,) = suspicions
    assert suspicion.reason == ErrorReason.ERROR_REASON_PEER_RAISED
    assert "holds the state" in suspicion.text


def test_generations_that_fail_before_their_first_step_are_counted() -> None:
    """Members that no door lets in compare nothing, so they never come to a step."""
    port, line, place = line_that_holds(Tag(2, 7))
    for generation in range(3, 3 + MAX_ATTEMPTS):
        came = view(port, generation, Tag(2, 7), "former")
        port.meshes[0].fault.suspect(Suspicion(ErrorReason.ERROR_REASON_VERSION, 1, 0, "its door does not open"))
        line._handle(came)
        assert place.phase is Phase.MEETING
    with pytest.raises(StepVoid, match=r"step 1 failed 5 times in a row: .*its door does not open"):
        line._handle(view(port, 3 + MAX_ATTEMPTS, Tag(2, 7), "former"))


def test_a_late_view_of_a_replaced_session_is_ignored() -> None:
    """The list of its members came late, after this worker had got another session."""
    port, line, place = line_that_holds(Tag(2, 7))
    late = view(port, 3, Tag(2, 7), "former")
    port.id = "new"
    line._handle(SessionReplaced())
    line._handle(late)
    assert place.generation == 0, "it is a candidate, and what it says is to be heard"


@pytest.mark.parametrize("newcomers", [frozenset[int](), frozenset({0})])
def test_a_newcomer_keeps_no_microbatch_sums(newcomers: frozenset[int]) -> None:
    """Each worker builds its own state (0, 0), so its sums may be of another state (0, 0) than the members' one."""
    base = Tag(0, 0)
    port, line, _ = line_that_holds(base, sampler=paceline.ElasticSampler(8, global_batch=4, microbatches=2))
    assert line._kept_sums is not None
    line._kept_sums._base, line._kept_sums._nodes = base, ((0, 1),)
    line._handle(view(port, 3, base, "former", newcomers | {1}))
    assert line._kept_sums.nodes() == (() if newcomers else ((0, 1),))
