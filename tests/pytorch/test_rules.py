"""Rules of the loop with torch's objects: what a script forgets is named in its first steps, what is legal is not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from unit.elastic.solo import ENVIRONMENT, fail

import paceline
import paceline.torch
from paceline.errors import StepOrderError, UnsupportedOp

pytestmark = pytest.mark.needs(what="torch")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    with torch.random.fork_rng(), paceline.join() as joined:
        yield joined


class Training:
    """A net, and all that goes with it; `parts` is what of it is in the training state."""

    def __init__(self, session: Any) -> None:
        torch.manual_seed(0)
        self.session = session
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        self.model = paceline.torch.DDP(self.net, session.group)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.applied = 0

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 3)).square().sum().backward()
        self.optimizer.step()

    def run(
        self,
        inside: Callable[[Any], None] | None = None,
        after: Callable[[Any], None] = lambda step: None,
        total: int = 5,
    ) -> None:
        self.applied = 0
        for step in self.session.steps(paceline.TrainState(**self.parts), total=total):
            with step:
                if inside is None:
                    self.update()
                else:
                    inside(step)
            self.applied += step.applied
            after(step)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "a sequence": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 1)], [2]),
    "a chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 1)]),
}


class Wrapped:
    """What a trainer may have around a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.schedulers = {"rate": [scheduler]}

    def state_dict(self) -> Any:
        return self.schedulers["rate"][0].state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.schedulers["rate"][0].load_state_dict(saved)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_missing_scheduler_is_refused(kind: str, session: Any) -> None:
    training = Training(session)
    scheduler = SCHEDULERS[kind](training.optimizer)
    with pytest.raises(ValueError, match=r"rate of optimizer \(AdamW\) has a scheduler .* scheduler=scheduler"):
        training.run()
    assert training.applied == 0
    for part in (scheduler, Wrapped(scheduler)) if kind == "step" else (scheduler,):
        training.parts["schedule"] = part
        training.run(lambda step: (training.update(), scheduler.step()), total=training.applied + 2)  # type: ignore[func-returns-value]


def test_a_missing_model_is_refused(session: Any) -> None:
    training = Training(session)
    del training.parts["model"]
    with pytest.raises(ValueError, match=r"optimizer \(AdamW\) trains 6 parameters \(of 6\) .* of shape \[4, 3\]"):
        training.run()


def test_a_missing_part_of_the_model_is_refused(session: Any) -> None:
    training = Training(session)
    training.parts["model"] = training.net[0]
    with pytest.raises(ValueError, match=r"trains 4 parameters \(of 6\)"):
        training.run()


@pytest.mark.parametrize("others", [{}, {"second": lambda net: torch.optim.SGD(net[0].parameters(), lr=0.1)}])
def test_a_missing_optimizer_is_refused_before_its_update(others: Any, session: Any) -> None:
    training = Training(session)
    del training.parts["optimizer"]
    training.parts |= {name: make(training.net) for name, make in others.items()}
    before = copy.deepcopy(training.net.state_dict())
    with pytest.raises(StepOrderError, match=r"\(AdamW\) that is no part of the training state .* model '0\.weight'"):
        training.run()
    assert training.applied == 0
    for path, values in training.net.state_dict().items():
        assert torch.equal(values, before[path]), "it was held back, and what forward changed is undone"


def test_an_unregistered_optimizer_between_steps_is_refused(session: Any) -> None:
    training = Training(session)
    other = torch.optim.SGD(training.net.parameters(), lr=0.1)
    with pytest.raises(StepOrderError, match=r"\(SGD\) that is no part"):
        training.run(after=lambda step: other.step())


def test_a_scheduler_step_outside_the_block_is_refused(session: Any) -> None:
    training = Training(session)
    training.parts["schedule"] = scheduler = lr_scheduler.StepLR(training.optimizer, 1)
    with pytest.raises(StepOrderError, match=r"^schedule changed between step 1 and the next one"):
        training.run(after=lambda step: scheduler.step())
    assert training.applied == 1


@torch.no_grad()  # type: ignore[untyped-decorator]
def shrink(net: Any) -> None:
    net[2].weight.mul_(0.9)


def normalize(net: Any) -> None:
    net(torch.ones(4, 3))


@pytest.mark.parametrize(("change", "what"), [(shrink, r"model '2\.weight'"), (normalize, "model")])
def test_a_model_change_outside_the_block_is_refused(change: Any, what: str, session: Any) -> None:
    training = Training(session)
    with pytest.raises(StepOrderError, match=f"^{what} changed between step 1 and the next one"):
        training.run(after=lambda step: change(training.net))


def test_a_model_change_before_the_update_is_refused(session: Any) -> None:
    training = Training(session)
    with pytest.raises(StepOrderError, match=r"^model '2\.weight' changed in step 1 before optimizer\.step\(\)"):
        training.run(lambda step: (shrink(training.net), training.update()))  # type: ignore[func-returns-value]


def test_a_legal_training_script_is_accepted(session: Any) -> None:
    """Averages, accumulation, a rate set by hand, unfreezing, optimizers of other models, and a failure."""
    training = Training(session)
    net, model, optimizer = training.net, training.model, training.optimizer
    net[0].requires_grad_(False)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    training.parts |= {"averaged": averaged, "best": {"weight": net[0].weight.detach().clone()}}
    probe = torch.nn.Linear(1, 1)
    probing = torch.optim.SGD(probe.parameters(), lr=0.1)
    frozen, undone = [], 0

    def inside(step: Any) -> None:
        training.parts["best"]["weight"].add_(1)
        optimizer.param_groups[0]["lr"] = 0.1 / step.number
        if step.number == 3:
            net[0].requires_grad_(True)
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.ones(4, 3)).sum().backward()
        model(torch.ones(4, 3)).square().sum().backward()
        if step.number == 3 and step.attempt == 1:
            fail(session)
        optimizer.step()
        averaged.update_parameters(net)

    def after(step: Any) -> None:
        nonlocal undone
        undone += not step.applied
        frozen.append(not net[0].weight.requires_grad)
        optimizer.param_groups[0]["lr"] = 0.1 / (step.number + 1)
        probe(torch.ones(1, 1)).backward()
        probing.step()
        for attempt in session.retry():
            with attempt, torch.no_grad():
                session.group.all_reduce(averaged.module.eval()(torch.ones(4, 3)).numpy())

    training.run(inside, after, total=6)
    assert undone == 1
    assert frozen == [True, True, True, False, False, False, False], "what is undone is frozen again"


class Steps:
    """An optimizer with another one inside, as accelerate has it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.inner.load_state_dict(saved)


def test_a_wrapped_optimizer_trains_and_its_hook_is_removed(session: Any) -> None:
    training, seen = Training(session), list[int]()
    training.optimizer = training.parts["optimizer"] = Steps(training.optimizer)
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks  # type: ignore[attr-defined]
    before = dict(hooks)
    training.run(after=lambda step: seen.append(len(hooks)))
    assert training.applied == 5
    assert set(seen) == {len(before) + 1}
    assert hooks == before


def test_code_of_a_step_outside_of_its_block_is_refused_with_the_remedy(session: Any) -> None:
    training = Training(session)
    steps = session.steps(paceline.TrainState(**training.parts), total=3)
    next(steps)
    with pytest.raises(StepOrderError, match="All code of a step belongs inside `with step:`"):
        training.model(torch.ones(4, 3)).square().sum().backward()
    with pytest.raises(StepOrderError, match="call it inside `with step:`"):
        training.optimizer.step()
    steps.close()


def test_a_forgotten_update_is_warned_of_once(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(session)
    training.run(inside=lambda step: training.model(torch.ones(4, 3)).square().sum().backward())
    assert training.applied == 0
    (told,) = [record.getMessage() for record in caplog.records if "optimizer.step()" in record.getMessage()]
    assert told.startswith("all ranks skip step 1, because none called optimizer.step() in its block")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_missing_parts_of_an_fsdp_training_state_are_refused(strategy: str, session: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model = paceline.torch.FSDP(net, session.group, paceline.ShardingStrategy[strategy])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(state: paceline.TrainState) -> None:
        for step in session.steps(state, total=4):
            with step:
                optimizer.zero_grad()
                model(torch.ones(4, 3)).square().sum().backward()
                optimizer.step()

    with pytest.raises(StepOrderError, match=r"\(AdamW\) that is no part .* model '0\.weight'"):
        train(paceline.TrainState(model=model))
    with pytest.raises(ValueError, match=r"optimizer \(AdamW\) trains 4 parameters"):
        train(paceline.TrainState(optimizer=optimizer))
    train(paceline.TrainState(model=model, optimizer=optimizer))
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match=r"rate of optimizer \(AdamW\) has a scheduler"):
        train(paceline.TrainState(model=model, optimizer=optimizer))
    session.steps(paceline.TrainState(model=model, optimizer=optimizer, schedule=scheduler), total=4)


def wrap_for_rounds(net: Any, group: Any) -> Any:
    return paceline.torch.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), group)


@pytest.mark.parametrize("wrap", [paceline.torch.DDP, paceline.torch.FSDP, wrap_for_rounds])
def test_sync_batch_norm_is_refused(wrap: Any, session: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.SyncBatchNorm(4)))
    with pytest.raises(UnsupportedOp, match=r"^1\.0 is a SyncBatchNorm, .* Use GroupNorm"):
        wrap(net, session.group)
