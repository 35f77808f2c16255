"""Defects that a simulation of imitations hid: each is planted again, in the real shells, and found.

What is expected is the kind of breach, not its seed: which schedule finds it first may change with any change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulation.group import Group
from simulation.test_broken_rules import found
from simulation.test_schedules import (
    AWAY,
    DISKS,
    FIXED,
    FORGETFUL,
    LATE,
    LOST,
    RECLAIMED,
    SEEN,
    SMALL,
    STUCK,
    STUCK_MOST,
)

from paceline._elastic import attempts
from paceline._elastic.saver import Saver
from paceline._elastic.training_loop import TrainingLoop
from paceline._session import identity, line_client
from paceline._session.generations import Generations
from paceline._session.inbox import InboxMessage, ViewLinked
from paceline_protocol import Process, _lineage
from paceline_protocol._silence import Stragglers
from paceline_protocol.coordinator import JobState, ViewStored
from paceline_server.keeper import Keeper


def test_a_candidate_is_to_reach_members_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a job of fixed size never gets its replacement in."""
    honest = line_client.LineClient._learn_members

    async def learn(side: Any, running: Any) -> None:
        side._running = replace(running, ended=())
        await honest(side, side._running)

    monkeypatch.setattr(line_client.LineClient, "_learn_members", learn)
    assert found(400, FIXED).startswith("liveness")


def test_members_that_hang_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stragglers, "overdue", lambda stragglers, now: ([], 0.0))
    assert found(400, STUCK).startswith("liveness")


def test_most_members_hang_together_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are never there to show that it is no long step."""
    honest = Stragglers.__init__

    def begin(stragglers: Stragglers, state: JobState) -> None:
        honest(stragglers, state)
        monkeypatch.setattr(stragglers._all, "rings", lambda now, timeout: False)

    monkeypatch.setattr(Stragglers, "__init__", begin)
    assert found(400, STUCK_MOST, first=50).startswith("liveness")


def test_the_line_is_finished_while_its_last_checkpoint_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainingLoop.close

    def close(line: TrainingLoop) -> None:
        line._job_line.finish(line._total)
        honest(line)

    monkeypatch.setattr(TrainingLoop, "close", close)
    assert found(400, DISKS).startswith("durability")


def test_attempts_count_whose_culprits_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_worker", lambda peer: "some worker")
    assert "StepVoid" in found(400, RECLAIMED)


def test_an_older_copy_of_the_coordinators_state_is_taken_for_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lineage.Lineage, "see_generation", lambda line, now, generation, failure_timeout: [])
    assert found(400, replace(FORGETFUL, faults=(3, 7)), first=65).startswith(("refused", "mismatch"))


def test_tags_that_are_brought_do_not_raise_the_number_of_the_next_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then two hosts make different checkpoints of one tag."""
    monkeypatch.setattr(_lineage, "max", lambda known, *tags: known, raising=False)
    assert found(400, LOST).startswith("I3")


def test_a_member_that_refuses_a_view_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the others wait for it until the step times out."""
    honest = TrainingLoop._end_generation

    def end_generation(line: TrainingLoop, why: str) -> None:
        if not why.startswith("holds the state"):
            honest(line, why)

    monkeypatch.setattr(TrainingLoop, "_end_generation", end_generation)
    assert found(400, replace(AWAY, steps=(8, 14), step_timeout=600.0), first=140).startswith("liveness")


def test_a_view_is_entered_that_came_for_the_former_member(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainingLoop._handle

    def read(line: TrainingLoop, message: InboxMessage) -> None:
        mine = line._job_line.member_id
        renamed = replace(message, member_id=mine) if isinstance(message, ViewLinked) else message
        honest(line, renamed)

    monkeypatch.setattr(TrainingLoop, "_handle", read)
    assert found(400, replace(LATE, step_timeout=600.0), first=435).startswith("liveness")


def test_a_generation_goes_on_after_the_next_has_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a member that is in a step of it waits there for the others, or they finish the job beside the next."""
    honest = Generations.formed

    def formed(generations: Generations, generation: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generations, "outdate", lambda text: None)
            honest(generations, generation)

    monkeypatch.setattr(Generations, "formed", formed)
    assert found(400, replace(AWAY, steps=(8, 14), step_timeout=600.0), first=605).startswith(("liveness", "I6"))


def test_a_view_that_was_not_stored_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(keeper: Keeper, job: Any, generation: int, began: float, done: Any) -> None:
        done.exception()
        keeper._apply(job, ViewStored(generation))

    monkeypatch.setattr(Keeper, "_view_written", written)
    assert found(400, DISKS).startswith("I3")


def test_the_gate_opens_before_all_that_was_called_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "flush", lambda group: None)
    assert found(100, SMALL).startswith("I1")


def test_nobody_writes_when_the_lowest_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saver, "_write_now", lambda saver, held, state, attempt: None)
    assert found(100, DISKS).startswith("durability")


def test_a_worker_looks_for_a_process_of_another_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither whom the coordinator asks nor what the worker answers depends on the pid namespace."""

    def is_gone(other: Process) -> bool:
        return honest(replace(other, pid_namespace=identity._pid_namespace()))

    honest = identity.is_gone
    monkeypatch.setattr(line_client, "is_gone", is_gone)
    monkeypatch.setattr(Process, "sight", property(lambda process: (process.host, process.boot_id, 1)))
    assert found(400, replace(SEEN, away=True)).startswith(("I1", "I2", "two lines"))


def test_a_worker_does_not_look_whether_others_of_its_container_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_client, "is_gone", lambda _: False)
    assert "see that all members have ended" in found(400, SEEN, first=50)


def test_another_process_with_its_pid_is_taken_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = identity.is_gone

    def is_gone(other: Process) -> bool:
        return honest(other) and not identity._start_ticks(other.pid)

    monkeypatch.setattr(line_client, "is_gone", is_gone)
    assert "see that all members have ended" in found(400, SEEN, first=50)


def test_an_unreaped_process_is_taken_for_a_running_one(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = identity.is_gone

    def is_gone(other: Process) -> bool:
        return honest(other) and identity._start_ticks(other.pid) != other.start_ticks

    monkeypatch.setattr(line_client, "is_gone", is_gone)
    assert "see that all members have ended" in found(400, replace(SEEN, zombies=True), first=315)
