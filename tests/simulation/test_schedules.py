"""Thousands of schedules of one job, each with its own faults: no invariant breaks, and every job finishes.

A seed that fails prints its events; `simulation.runner.replay(seed, shape)` runs it again.
"""

from dataclasses import replace

import pytest
from simulation.runner import run
from simulation.world import Shape

SMALL = Shape()
PAIRS = Shape(members=(1, 3), steps=(3, 8), faults=(3, 9), closed=0.1)
SPREAD = Shape(members=(2, 4), faults=(2, 7), node_size=0)
NODES = Shape(members=(3, 6), faults=(2, 7), node_size=2)
HOSTS = Shape(members=(4, 7), faults=(2, 7), node_size=2, hosts=3)
AWAY = Shape(members=(2, 4), away=True)
FORGETFUL = Shape(faults=(2, 6), loses_disk=True)


@pytest.mark.parametrize("first", range(0, 2400, 800))
def test_a_job_with_faults_finishes(first: int) -> None:
    for seed in range(first, first + 800):
        run(seed, SMALL)


def test_a_few_members_with_many_faults() -> None:
    for seed in range(100_000, 101_000):
        run(seed, PAIRS)


@pytest.mark.parametrize("first", range(300_000, 301_200, 600))
def test_a_state_that_all_hold_between_them(first: int) -> None:
    for seed in range(first, first + 600):
        run(seed, SPREAD)


@pytest.mark.parametrize("first", range(400_000, 401_200, 600))
def test_a_state_that_each_node_holds(first: int) -> None:
    for seed in range(first, first + 600):
        run(seed, NODES)


@pytest.mark.parametrize("node_size", [2, 3])
def test_nodes_where_several_members_are_on_a_host(node_size: int) -> None:
    for seed in range(700_000, 700_400):
        run(seed, replace(HOSTS, node_size=node_size))


@pytest.mark.parametrize("node_size", [0, 2])
def test_a_coordinator_that_forgets_mixes_no_shares(node_size: int) -> None:
    for seed in range(500_000, 500_300):
        run(seed, replace(FORGETFUL, node_size=node_size))


@pytest.mark.parametrize("node_size", [0, 1, 2])
def test_a_coordinator_that_is_away_while_members_leave(node_size: int) -> None:
    for seed in range(600_000, 600_300):
        run(seed, replace(AWAY, node_size=node_size))


def test_a_coordinator_that_forgets_mixes_no_states() -> None:
    for seed in range(200_000, 200_500):
        run(seed, FORGETFUL)


def test_without_faults_a_job_needs_no_operator_and_few_generations() -> None:
    for seed in range(50):
        outcome = run(seed, Shape(faults=(0, 0)))
        assert outcome.generations <= 2 + 3  # one to compare, one to train, and one for whoever came late
        assert outcome.restarts == 0


def test_a_seed_repeats_exactly() -> None:
    assert run(4711) == run(4711)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "shape", [SMALL, PAIRS, Shape(members=(4, 6), steps=(5, 12), faults=(4, 14)), SPREAD, NODES, HOSTS, AWAY]
)
def test_far_more_of_them(shape: Shape) -> None:
    for seed in range(1_000_000, 1_002_500):
        run(seed, shape)
