"""What torch draws in a step of `session.steps` follows from (seed, step, rank), whatever happened before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from unit.elastic.solo import ENVIRONMENT, fail

import paceline

pytestmark = pytest.mark.needs(what="torch")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    with torch.random.fork_rng():
        yield


def masks(total: int, *, seed: int = 0, failing: int = 0, saved: Any = None, **settings: Any) -> list[list[float]]:
    """The dropout masks of all steps that count; step `failing` is undone twice, after it has drawn."""
    drawn = []
    with paceline.join() as session:
        state = paceline.TrainState(net=torch.nn.Linear(2, 2))
        if saved is not None:
            state.load_state_dict(saved)
        for step in session.steps(state, total=total, seed=seed, **settings):
            with step:
                mask = torch.nn.functional.dropout(torch.ones(16)).tolist()
                if step.number == failing and step.attempt < 3:
                    fail(session)
            if step.applied:
                drawn.append(mask)
    return drawn


def test_a_retried_step_draws_the_same_masks() -> None:
    expected = masks(4)
    assert len({tuple(mask) for mask in expected}) == 4
    assert masks(4, failing=2) == expected


def test_masks_do_not_depend_on_earlier_draws() -> None:
    expected = masks(2)
    torch.manual_seed(5)
    torch.rand(3)
    assert masks(2) == expected
    assert masks(2, seed=1) != expected


def test_a_resumed_run_draws_the_masks_of_an_undisturbed_run() -> None:
    state = paceline.TrainState(net=torch.nn.Linear(2, 2))
    state.step = 3
    torch.rand(7)
    assert masks(5, saved=state.state_dict()) == masks(5)[3:]


def test_seed_step_and_rank_determine_the_random_numbers() -> None:
    from paceline._elastic.foreign import seed_frameworks

    drawn = set()
    for seed, step, rank in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (1 << 40, 1, 0), (0, 1 << 33, 1)]:
        for _ in range(2):
            seed_frameworks(seed, step, rank)
            drawn.add(tuple(torch.rand(4).tolist()))
    assert len(drawn) == 6
