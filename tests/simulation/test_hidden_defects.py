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


def test_requiring_links_to_ended_members_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a job of fixed size never gets its replacement in."""
    honest = line_client.LineClient._learn_members

    async def learn(side: Any, running: Any) -> None:
        side._running = replace(running, ended=())
        await honest(side, side._running)

    monkeypatch.setattr(line_client.LineClient, "_learn_members", learn)
    assert found(400, FIXED).startswith("liveness")


def test_waiting_for_hanging_members_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stragglers, "overdue", lambda stragglers, now: ([], 0.0))
    assert found(400, STUCK).startswith("liveness")


def test_waiting_for_a_hanging_majority_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are never there to show that it is no long step."""
    honest = Stragglers.__init__

    def begin(stragglers: Stragglers, state: JobState) -> None:
        honest(stragglers, state)
        monkeypatch.setattr(stragglers._all, "rings", lambda now, timeout: False)

    monkeypatch.setattr(Stragglers, "__init__", begin)
    assert found(400, STUCK_MOST, first=55).startswith("liveness")


def test_finishing_before_the_last_checkpoint_is_written_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainingLoop.close

    def close(line: TrainingLoop) -> None:
        line._job_line.finish(line._total)
        honest(line)

    monkeypatch.setattr(TrainingLoop, "close", close)
    assert found(400, DISKS).startswith("durability")


def test_counting_attempts_whose_culprits_have_left_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_worker", lambda peer: "some worker")
    assert "StepVoid" in found(400, RECLAIMED)


def test_trusting_an_older_copy_of_the_coordinator_state_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lineage.Lineage, "see_generation", lambda line, now, generation, failure_timeout: [])
    assert found(400, replace(FORGETFUL, faults=(3, 7)), first=65).startswith(("refused", "mismatch"))


def test_ignoring_generations_of_brought_tags_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then two hosts make different checkpoints of one tag."""
    monkeypatch.setattr(_lineage, "max", lambda known, *tags: known, raising=False)
    assert found(400, LOST).startswith("I3")


def test_refusing_a_view_without_reporting_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the others wait for it until the step times out."""
    honest = TrainingLoop._end_generation

    def end_generation(line: TrainingLoop, why: str) -> None:
        if not why.startswith("holds the state"):
            honest(line, why)

    monkeypatch.setattr(TrainingLoop, "_end_generation", end_generation)
    assert found(400, replace(AWAY, steps=(8, 14), step_timeout=600.0), first=140).startswith("liveness")


def test_entering_a_view_meant_for_the_former_member_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainingLoop._handle

    def read(line: TrainingLoop, message: InboxMessage) -> None:
        mine = line._job_line.member_id
        renamed = replace(message, member_id=mine) if isinstance(message, ViewLinked) else message
        honest(line, renamed)

    monkeypatch.setattr(TrainingLoop, "_handle", read)
    assert found(400, replace(LATE, step_timeout=600.0), first=435).startswith("liveness")


def test_continuing_a_generation_after_the_next_formed_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a member that is in a step of it waits there for the others, or they finish the job beside the next."""
    honest = Generations.formed

    def formed(generations: Generations, generation: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generations, "outdate", lambda text: None)
            honest(generations, generation)

    monkeypatch.setattr(Generations, "formed", formed)
    assert found(400, replace(AWAY, steps=(8, 14), step_timeout=600.0), first=605).startswith(("liveness", "I6"))


def test_announcing_a_view_that_was_not_stored_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(keeper: Keeper, job: Any, generation: int, began: float, done: Any) -> None:
        done.exception()
        keeper._apply(job, ViewStored(generation))

    monkeypatch.setattr(Keeper, "_view_written", written)
    assert found(400, DISKS).startswith("I3")


def test_opening_the_gate_before_all_operations_complete_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "flush", lambda group: None)
    assert found(100, SMALL).startswith("I1")


def test_losing_the_checkpoint_when_the_lowest_rank_is_gone_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saver, "_write_now", lambda saver, held, state, attempt: None)
    assert found(100, DISKS).startswith("durability")


def test_looking_for_processes_of_another_container_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither whom the coordinator asks nor what the worker answers depends on the pid namespace."""

    def is_gone(other: Process) -> bool:
        return honest(replace(other, pid_namespace=identity._pid_namespace()))

    honest = identity.is_gone
    monkeypatch.setattr(line_client, "is_gone", is_gone)
    monkeypatch.setattr(Process, "sight", property(lambda process: (process.host, process.boot_id, 1)))
    assert found(400, replace(SEEN, away=True)).startswith(("I1", "I2", "two lines"))


def test_not_looking_for_ended_processes_of_the_container_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_client, "is_gone", lambda _: False)
    assert "see that all members have ended" in found(400, SEEN, first=50)


def test_mistaking_a_reused_pid_for_the_former_process_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = identity.is_gone

    def is_gone(other: Process) -> bool:
        return honest(other) and not identity._start_ticks(other.pid)

    monkeypatch.setattr(line_client, "is_gone", is_gone)
    assert "see that all members have ended" in found(400, SEEN, first=50)


def test_mistaking_an_unreaped_process_for_a_running_one_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = identity.is_gone

    def is_gone(other: Process) -> bool:
        return honest(other) and identity._start_ticks(other.pid) != other.start_ticks

    monkeypatch.setattr(line_client, "is_gone", is_gone)
    assert "see that all members have ended" in found(400, replace(SEEN, zombies=True), first=315)
