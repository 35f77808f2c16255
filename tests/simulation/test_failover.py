"""Several coordinators on one store, paused, cut off and killed at any moment, through joins, steps and meetings.

The interleavings that decision 05 lists come about here. `Shape.unfenced` takes away what a leader does by its clock:
then a deposed leader goes on for seconds, and members come back to it.
"""

from dataclasses import replace

import pytest
from simulation.runner import run
from simulation.test_broken_rules import found
from simulation.world import Shape

from paceline._session.control import ControlStream
from paceline_protocol.coordinator import StoreView, ViewStored
from paceline_server.keeper import Job, Keeper, Kept
from support.shared_keys import Node

PAIR = Shape(members=(2, 4), faults=(2, 7), coordinators=2)
UNFENCED = Shape(members=(2, 4), steps=(4, 8), faults=(2, 5), coordinators=2, unfenced=True)

SHAPES = {
    "pair": (PAIR, 200),
    "pair-spread": (replace(PAIR, node_size=0), 80),
    "three": (replace(PAIR, coordinators=3, faults=(3, 9)), 120),
    "apart": (replace(PAIR, members=(2, 3), apart=True), 80),
    "drains": (replace(PAIR, drains=True), 80),
    "unfenced": (UNFENCED, 200),
    "unfenced-spread": (replace(UNFENCED, node_size=0), 80),
    "unfenced-three": (replace(UNFENCED, coordinators=3), 80),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_job_with_several_coordinators_finishes(name: str) -> None:
    shape, count = SHAPES[name]
    first = 100_000 * list(SHAPES).index(name)
    for seed in range(first, first + count // 16):
        run(seed, shape)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_many_more_schedules(name: str) -> None:
    shape, count = SHAPES[name]
    for seed in range(10_000_000, 10_000_000 + count // 4):
        run(seed, shape)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_many_more_schedules_exhaustively(name: str) -> None:
    shape, count = SHAPES[name]
    for seed in range(20_000_000, 20_000_000 + 3 * count):
        run(seed, shape)


def test_a_job_without_faults_needs_no_restart_and_few_generations() -> None:
    for seed in range(20):
        outcome = run(seed, replace(PAIR, faults=(0, 0)))
        assert outcome.generations <= 5
        assert outcome.restarts == 0


def test_accepting_messages_of_a_lower_epoch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a leader of the past tells them what was true before."""
    monkeypatch.setattr(ControlStream, "_is_current", lambda stream, message: True)
    assert found(400, UNFENCED, first=150)


def test_pushing_a_view_before_storing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(keeper: Keeper, job: Job, effect: Kept) -> None:
        honest(keeper, job, effect)
        if isinstance(effect, StoreView):
            keeper._apply(job, ViewStored(effect.view.generation))

    honest = Keeper.keep
    monkeypatch.setattr(Keeper, "keep", keep)
    assert "I3" in found(100, PAIR)


def test_storing_without_checking_the_leader_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that always succeeds is a put: two leaders store one number twice."""
    honest = Node.swap

    def swap(node: Node, key: bytes, revision: int, *rest: object) -> object:
        known = node.items.get(key)
        return honest(node, key, 0 if known is None else known.revision, *rest[:3])  # type: ignore[arg-type]

    monkeypatch.setattr(Node, "swap", swap)
    assert found(200, UNFENCED)
