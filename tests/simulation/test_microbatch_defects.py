"""Bugs in how sums of microbatches are kept and added up, and in the group: the simulation notices each.

What is expected is the kind of breach, not its seed: which schedule finds it first may change with any change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulation.links import LinkedCore
from simulation.test_broken_rules import found
from simulation.test_schedules import MICROBATCHES

from paceline._base.work import Lane
from paceline._collectives import tasks
from paceline._collectives.arithmetic import TreeArithmetic
from paceline._elastic.step import Step
from paceline._microbatch.kept_sums import KeptSums
from paceline._parallel import _buckets, _node_sums
from paceline_protocol import Tag


def test_keeping_sums_of_another_state_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(kept: KeptSums, base: Tag | None) -> None:
        kept._due = True

    monkeypatch.setattr(KeptSums, "enter", enter)
    assert found(200, MICROBATCHES).startswith("I6")


def test_letting_a_newcomer_reuse_kept_sums_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(kept: KeptSums, base: Tag | None) -> None:
        honest(kept, kept._base if base is None else base)

    honest = KeptSums.enter
    monkeypatch.setattr(KeptSums, "enter", enter)
    assert found(200, MICROBATCHES).startswith("I6")


def test_counting_a_kept_microbatch_twice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = _buckets.Bucket.keep_nodes

    def keep_nodes(bucket: _buckets.Bucket, nodes: Any, *, spare: int) -> None:
        honest(bucket, nodes, spare=spare)
        for _, sums in bucket._sums:
            np.add(sums.flat, sums.flat, out=sums.flat)

    monkeypatch.setattr(_buckets.Bucket, "keep_nodes", keep_nodes)
    assert found(200, MICROBATCHES).startswith("I6")


def test_adding_repaired_sums_rank_by_rank_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a quiet step that is the order of the tree."""

    def broken(*of: Any) -> TreeArithmetic:
        made = TreeArithmetic(*of)
        made._places = sorted(made._places)
        return made

    # In place of the function with the cache, which would keep what is broken for later tests.
    monkeypatch.setattr(tasks, "tree_arithmetic", broken)
    assert found(200, MICROBATCHES).startswith("I6")


def test_adding_microbatches_in_computation_order_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_node_sums, "closes", lambda left, right, leaves: left[1] == right[0])
    assert found(200, MICROBATCHES).startswith(("I6", "error"))


def test_contributing_after_half_an_update_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(step: Step) -> None:
        if step.keeps_copy:
            step._half_updated = True
        else:
            honest(step)

    honest = Step._spoil
    monkeypatch.setattr(Step, "_spoil", spoil)
    assert found(200, replace(MICROBATCHES, twice=True)).startswith("I6")


def test_opening_the_gate_before_all_operations_complete_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinkedCore, "flush", lambda group: None)
    assert found(200, MICROBATCHES).startswith("I1")


def test_running_the_latest_operation_first_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lane._enqueue

    def enqueue(lane: Lane, operation: int, task: Any) -> Any:
        work: Any = honest(lane, operation, task)
        lane._queue.rotate(1)
        return work

    monkeypatch.setattr(Lane, "_enqueue", enqueue)
    assert found(200, MICROBATCHES).startswith(("mismatch", "I6", "liveness", "error"))
