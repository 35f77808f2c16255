"""Thousands of schedules of one job, each with its own faults: no invariant breaks, and every job finishes.

A seed that fails prints its events; `simulation.runner.replay(seed, shape)` runs it again.
"""

import pytest
from simulation.runner import run
from simulation.world import Shape

SMALL = Shape()
PAIRS = Shape(members=(1, 3), steps=(3, 8), faults=(3, 9), closed=0.1)
FORGETFUL = Shape(faults=(2, 6), loses_disk=True)


@pytest.mark.parametrize("first", range(0, 2400, 800))
def test_a_job_with_faults_finishes(first: int) -> None:
    for seed in range(first, first + 800):
        run(seed, SMALL)


def test_a_few_members_with_many_faults() -> None:
    for seed in range(100_000, 101_000):
        run(seed, PAIRS)


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
@pytest.mark.parametrize("shape", [SMALL, PAIRS, Shape(members=(4, 6), steps=(5, 12), faults=(4, 14))])
def test_far_more_of_them(shape: Shape) -> None:
    for seed in range(1_000_000, 1_010_000):
        run(seed, shape)
