"""A block between two steps that was cut short: who runs it again, and who is past it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline._elastic.attempts import BlockOutcome
from paceline._elastic.gate import BETWEEN_STEPS
from paceline._elastic.retry import attempts
from paceline.errors import PeerLost


class Scene:
    """A member in a block that fails a few times; `outcomes`: what its line says of each failure."""

    def __init__(self, outcomes: list[BlockOutcome], *, ended: bool) -> None:
        self.done: list[str] = []
        self.fails = len(outcomes)
        self.ended = ended
        fault = SimpleNamespace(failed=False, error=lambda: PeerLost("rank 1 is gone"))
        self.fault = fault
        self.line: Any = SimpleNamespace(
            done=False,
            left=False,
            overtaken=False,
            retry=lambda: outcomes.pop(0),
            block_done=lambda: self.done.append("done"),
        )
        self.group: Any = SimpleNamespace(
            mesh=SimpleNamespace(fault=fault, peers=()), barrier=self._barrier, ban_reason=BETWEEN_STEPS
        )
        self.group._core = self.group
        self.group.ban_collectives = lambda reason: setattr(self.group, "ban_reason", reason)

    def run(self) -> list[bool]:
        found = []
        for attempt in attempts(self.line, self.group):
            with attempt:
                assert not self.group._core.ban_reason
                self.fault.failed = self.fails > 0 and not self.ended
                if self.fault.failed:
                    self.fails -= 1
                    raise self.fault.error()
            assert self.group._core.ban_reason == BETWEEN_STEPS
            self.fault.failed = False
            found.append(attempt.completed)
        return found

    def _barrier(self) -> None:
        if self.fails:
            self.fails -= 1
            self.fault.failed = True
            raise self.fault.error()


def test_an_interrupted_block_runs_again_until_completed() -> None:
    scene = Scene([BlockOutcome.AGAIN, BlockOutcome.AGAIN], ended=False)
    assert scene.run() == [False, False, True]
    assert scene.done == ["done"]


@pytest.mark.parametrize(("ended", "rounds"), [(True, 1), (False, 2)])
def test_a_passed_block_runs_again_only_if_not_ended_here(ended: bool, rounds: int) -> None:
    scene = Scene([BlockOutcome.PASSED], ended=ended)
    assert len(scene.run()) == rounds
    assert scene.done == ["done"]


def test_an_overtaken_block_is_not_run_again() -> None:
    """It had no seat for a hundred steps; the others are in a step now, and would take its block for another call."""
    scene = Scene([BlockOutcome.OVERTAKEN], ended=False)
    assert scene.run() == [False]
    assert scene.done == []


def test_an_overtaken_member_skips_further_blocks_before_its_next_step() -> None:
    scene = Scene([], ended=True)
    scene.line.overtaken = True
    assert scene.run() == []
    assert scene.done == []
