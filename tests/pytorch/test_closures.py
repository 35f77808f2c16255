"""`optimizer.step(closure)` in `session.steps`: the closure is evaluated, the gate opens, the state changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from unit.elastic.solo import ENVIRONMENT, fail

import paceline
from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.needs(what="torch")

FITTING = """
import torch
torch.set_num_threads(1)

class Fitting:
    '''A line through 24 points.'''

    def __init__(self, name, wrap, **settings):
        torch.manual_seed(0)
        self.x = torch.randn(24, 3, dtype=torch.float64)
        self.t = self.x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
        self.model = wrap(torch.nn.Linear(3, 1).double())
        self.optimizer = getattr(torch.optim, name)(self.model.parameters(), **settings)
        self.evaluations = 0

    def closure(self, indices, total=lambda loss: loss):
        def evaluate():
            self.evaluations += 1
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.model(self.x[indices]), self.t[indices])
            loss.backward()
            return total(loss.detach())
        return evaluate

    def weights(self):
        return [p.tolist() for p in self.model.parameters()]

OPTIMIZERS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.05}, "LBFGS": {"max_iter": 4}}
SAMPLER = dict(n=24, global_batch=12)
"""

exec(FITTING)
Fitting: Any = globals()["Fitting"]
OPTIMIZERS: dict[str, dict[str, Any]] = globals()["OPTIMIZERS"]
SAMPLER = paceline.ElasticSampler(24, global_batch=12)


def check(weights: list[Any], name: str, total: int) -> None:
    """Compares with one process that has no Paceline."""
    alone = Fitting(name, lambda net: net, **OPTIMIZERS[name])
    for number in range(total):
        alone.optimizer.step(alone.closure(SAMPLER.batch(number)))
    for found, expected in zip(weights, alone.weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    with torch.random.fork_rng(), paceline.join() as joined:
        yield joined


def fitting(name: str, session: Any) -> tuple[Any, paceline.TrainState]:
    made = Fitting(name, lambda net: paceline.torch.DDP(net, session.group), **OPTIMIZERS[name])
    return made, paceline.TrainState(model=made.model, optimizer=made.optimizer)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("as_keyword", [False, True])
def test_single_evaluation_optimizers_train_as_one_process(name: str, as_keyword: bool, session: Any) -> None:
    made, state = fitting(name, session)
    for step in session.steps(state, total=5):
        with step:
            closure = made.closure(SAMPLER.batch(step.number - 1))
            loss = made.optimizer.step(closure=closure) if as_keyword else made.optimizer.step(closure)
            assert loss.item() > 0
        assert step.applied
    assert made.evaluations == 5
    check(made.weights(), name, 5)


@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_a_failure_in_the_closure_undoes_the_step(name: str, session: Any) -> None:
    """In its last evaluation: with LBFGS the state has changed by then."""
    made, state = fitting(name, session)
    attempts, failing = 0, {"SGD": 2, "LBFGS": 7}[name]
    for step in session.steps(state, total=3):
        with step:
            attempts += 1
            if name == "LBFGS":
                step.keep_copy()

            def total(loss: Any) -> Any:
                if made.evaluations == failing:
                    fail(session)
                    session.group.all_reduce(np.ones(1))
                return loss

            made.optimizer.step(made.closure(SAMPLER.batch(step.number - 1), total))
    assert attempts == 4
    check(made.weights(), name, 3)


def test_lbfgs_without_keep_copy_raises_step_order_error(session: Any) -> None:
    made, state = fitting("LBFGS", session)
    before = made.weights()
    steps = session.steps(state, total=2)
    with (
        pytest.raises(paceline.StepOrderError, match=r"LBFGS evaluates its closure several .* step\.keep_copy\(\)"),
        next(steps),
    ):
        made.optimizer.step(made.closure(np.arange(12)))
    steps.close()
    assert made.weights() == before
    assert made.evaluations == 0


class Twice(torch.optim.SGD):
    """Evaluates its closure, updates, and does so again."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


class Never(torch.optim.SGD):
    """Ignores the closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


class First(torch.optim.SGD):
    """Changes the parameters before it evaluates the closure."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += 1.0
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Twice, "Twice evaluates its closure several times"),
        (Never, "Never was given a closure, and did not evaluate it"),
        (First, r"changed in step 1 before optimizer\.step\(\)"),
    ],
)
def test_optimizers_that_misuse_the_closure_are_refused(kind: Callable[..., Any], words: str, session: Any) -> None:
    made = Fitting("SGD", lambda net: paceline.torch.DDP(net, session.group), lr=0.1)
    made.optimizer = kind(made.model.parameters(), lr=0.1)
    state = paceline.TrainState(model=made.model, optimizer=made.optimizer)
    steps = session.steps(state, total=2)
    with pytest.raises(paceline.StepOrderError, match=words), next(steps):
        made.optimizer.step(made.closure(np.arange(12)))
    steps.close()


class Outer:
    """An optimizer with another one inside, as accelerate has it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.inner.load_state_dict(saved)


def test_a_wrapped_optimizer_evaluates_its_closure(session: Any) -> None:
    made, _ = fitting("Adam", session)
    made.optimizer = Outer(made.optimizer)
    for step in session.steps(paceline.TrainState(model=made.model, optimizer=made.optimizer), total=3):
        with step:
            made.optimizer.step(made.closure(SAMPLER.batch(step.number - 1)))
    check(made.weights(), "Adam", 3)


WORKER = (
    FITTING
    + """
from paceline.torch import DDP

with paceline.join() as session:
    made = Fitting(NAME, lambda net: DDP(net, session.group), **OPTIMIZERS[NAME])
    sampler = paceline.ElasticSampler(**SAMPLER)
    state = paceline.TrainState(model=made.model, optimizer=made.optimizer, sampler=sampler)
    for step in session.steps(state, total=5):
        with step:
            def total(loss):
                return torch.from_numpy(session.group.all_reduce(loss.numpy() * step.weight))
            if NAME == "LBFGS":
                step.keep_copy()
            made.optimizer.step(made.closure(step.indices, total))
    emit("trained", weights=made.weights())
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_train_with_closures_as_one_process(name: str) -> None:
    code = f"NAME = {name!r}\n{WORKER}"
    with coordinator() as address, workers(2, code, COORDINATOR=address, MIN_WORKERS="2") as started:
        first, second = [worker.expect("trained", timeout=60.0)["weights"] for worker in started]
        assert first == second
        check(first, name, 5)
