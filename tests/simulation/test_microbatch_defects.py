"""Bugs in how sums of microbatches are kept and added up, and in the group: the simulation notices each.

What is expected is the kind of breach, not its seed: which schedule finds it first may change with any change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulation.links import LinkedGroup
from simulation.test_broken_rules import found
from simulation.test_schedules import MICROBATCHES

from paceline._base.work import Lane
from paceline._collectives import tasks
from paceline._collectives.arithmetic import TreeArithmetic
from paceline._elastic.step import Step
from paceline._microbatch.kept_sums import KeptSums
from paceline._parallel import _buckets
from paceline_protocol import Tag


def test_sums_are_kept_of_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(kept: KeptSums, base: Tag | None) -> None:
        kept._due = True

    monkeypatch.setattr(KeptSums, "enter", enter)
    assert found(200, MICROBATCHES).startswith("I6")


def test_a_newcomer_brings_what_it_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(kept: KeptSums, base: Tag | None) -> None:
        honest(kept, kept._base if base is None else base)

    honest = KeptSums.enter
    monkeypatch.setattr(KeptSums, "enter", enter)
    assert found(200, MICROBATCHES).startswith("I6")


def test_a_microbatch_that_is_kept_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = _buckets.Bucket.keep_nodes

    def keep_nodes(bucket: _buckets.Bucket, nodes: Any, *, spare: int) -> None:
        honest(bucket, nodes, spare=spare)
        for _, sums in bucket._sums:
            np.add(sums.flat, sums.flat, out=sums.flat)

    monkeypatch.setattr(_buckets.Bucket, "keep_nodes", keep_nodes)
    assert found(200, MICROBATCHES).startswith("I6")


def test_sums_of_a_repair_are_added_up_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a quiet step that is the order of the tree."""

    def broken(*of: Any) -> TreeArithmetic:
        made = TreeArithmetic(*of)
        made._places = sorted(made._places)
        return made

    # In place of the function with the cache, which would keep what is broken for later tests.
    monkeypatch.setattr(tasks, "tree_arithmetic", broken)
    assert found(200, MICROBATCHES).startswith("I6")


def test_microbatches_are_added_up_in_the_order_in_which_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buckets, "closes", lambda left, right, leaves: left[1] == right[0])
    assert found(200, MICROBATCHES).startswith(("I6", "error"))


def test_a_rank_gives_to_a_step_what_it_computes_from_half_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(step: Step) -> None:
        if step.keeps_copy:
            step.half_updated = True
        else:
            honest(step)

    honest = Step.spoil
    monkeypatch.setattr(Step, "spoil", spoil)
    assert found(200, replace(MICROBATCHES, twice=True)).startswith("I6")


def test_the_gate_of_real_groups_opens_before_all_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinkedGroup, "flush", lambda group: None)
    assert found(200, MICROBATCHES).startswith("I1")


def test_a_groups_thread_runs_the_latest_operation_first(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lane._enqueue

    def enqueue(lane: Lane, operation: int, task: Any) -> Any:
        work: Any = honest(lane, operation, task)
        lane._queue.rotate(1)
        return work

    monkeypatch.setattr(Lane, "_enqueue", enqueue)
    assert found(200, MICROBATCHES).startswith(("mismatch", "I6", "liveness", "error"))
