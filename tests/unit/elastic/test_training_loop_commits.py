"""A member's line: what a newcomer announces, and when the job counts as done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import checkpoint
from paceline._elastic.job_line import SoloLine
from paceline._elastic.offer import Content
from paceline._elastic.steps import make_loop, run_steps
from paceline._elastic.train_state import TrainState
from paceline._group import Group
from paceline._links.base import Peer
from paceline._links.local import next_meshes
from paceline._session.inbox import ViewLinked
from paceline.config import Config
from paceline_protocol import Meet, Tag
from paceline_protocol.messages import MemberList, ViewFormed
from support.parts import local_mesh, world_of

BASE = Tag(4, 6)


def state_at(step: int, value: float) -> TrainState:
    state = TrainState(values={"n": np.array([value])})
    state.step = step
    return state


class NewcomersPort(SoloLine):
    """The first view has this member as a newcomer to a line that is at step 6; others give it that state."""

    came_in = False

    def meet(self, meet: Meet) -> None:
        if self.came_in:
            super().meet(meet)
            return
        self.came_in = True
        (mesh,) = next_meshes([local_mesh(self.group._core.mesh)])
        mesh.generation = 5
        view = ViewFormed(MemberList(5, 1), 0, BASE, newcomers=(0,))
        self.inbox.put(ViewLinked(view, mesh, self.member_id))

    def take(self, tag: Tag, donors: Sequence[Peer], own: Content) -> Content:
        assert tag == BASE
        return state_at(6, 60.0)._core.offered()


class WatchedPort(SoloLine):
    """Looks at the disk when the coordinator is told that the line is done."""

    def __init__(self, group: Group, directory: Path) -> None:
        super().__init__("job", group, Config())
        self._directory = directory
        self.there: list[Any] = []

    def finish(self, step: int) -> None:
        self.there.append(checkpoint.tags(self._directory))
        super().finish(step)


def trained(line: Any, state: TrainState, total: int) -> list[int]:
    """The numbers of the steps that were run."""
    numbers = []
    for step in run_steps(line, state._core):
        numbers.append(step.number)
        with step:
            pass
    return numbers


@pytest.fixture
def alone() -> Any:
    with world_of(1) as (group,):
        yield group


def test_a_newcomer_announces_commits_from_its_first_step(alone: Group) -> None:
    state, heard = state_at(0, 0.0), []
    port = NewcomersPort("job", alone, Config())
    line = make_loop(port, state._core, 8, checkpoint_dir=None, checkpoint_every=None, seed=0, before=None)
    line.on_commit.append(heard.append)
    assert trained(line, state, 8) == [7, 8]
    assert heard == [7, 8]


@pytest.mark.parametrize("every", [None, 2])
def test_finish_is_sent_after_the_last_checkpoint_is_on_disk(alone: Group, tmp_path: Path, every: int | None) -> None:
    state, port = state_at(0, 0.0), WatchedPort(alone, tmp_path)
    line = make_loop(port, state._core, 3, checkpoint_dir=tmp_path, checkpoint_every=every, seed=0, before=None)
    assert trained(line, state, 3) == [1, 2, 3]
    assert [tags[-1].step for tags in port.there] == [3]
