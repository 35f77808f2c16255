"""Copies of other ranks' shards under torch's optimizers: the optimizer itself updates them, and they keep its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pytorch.torch_models import made
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from unit.elastic.resharding import all_do, check_copies, form, take_copies, together

import paceline
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline.errors import UnsupportedOp
from paceline.torch import FSDP
from support.parts import SOON

pytestmark = [pytest.mark.needs(what="torch")]

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=False),
    "Adam, amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
}

opened: list[Trainee] = []


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    while opened:
        opened.pop().group.close(0.2)


class Trainee:
    """One process."""

    def __init__(
        self, group: Group, optimizer: Callable[[Any], Any], strategy: str = "FULL_SHARD", *, schedules: bool = True
    ) -> None:
        self.group = group
        network = made(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))
        self.model = FSDP(
            network, group, paceline.ShardingStrategy[strategy], auto_wrap=(nn.Linear, nn.Tanh), redundancy=2
        )
        groups = list(self.model.parameters())
        self.optimizer = optimizer([{"params": groups[:2]}, {"params": groups[2:], "lr": 0.02}])
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9 if schedules else 1.0)
        self.state = paceline.TrainState(model=self.model, optimizer=self.optimizer)
        opened.append(self)

    def step(self, number: int, rank: int, world: int) -> None:
        del world
        torch.manual_seed(10 * number + rank)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(torch.randn(4, 5)), torch.tensor([0, 1, 2, 1])).backward()
        if self.state._core.copies:
            self.state._core.send_gradients(self.group)
            self.state._core.update_copies()
        self.optimizer.step()
        self.schedule.step()


def trainees(world: int, optimizer: Callable[[Any], Any], strategy: str = "FULL_SHARD") -> list[Trainee]:
    here = [Trainee(Group(mesh, SOON), optimizer, strategy) for mesh in local_meshes(world)]
    form(here, 1)
    together(here, 0)
    take_copies(here)
    return here


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_copies_have_the_bits_of_the_shards_after_each_step(optimizer: Callable[[Any], Any]) -> None:
    here = trainees(3, optimizer)
    for number in range(1, 4):
        together(here, number)
        assert check_copies(here) == 3


def test_copies_under_shard_grad_op_hold_only_shards() -> None:
    here = trainees(2, OPTIMIZERS["AdamW"], "SHARD_GRAD_OP")
    together(here, 1)
    assert check_copies(here) == 2


def test_a_parameter_that_is_unfrozen_later_gets_its_state_in_copies_too() -> None:
    def frozen(parameters: Any) -> Any:
        parameters[0]["params"][0].requires_grad_(False)
        return torch.optim.AdamW(parameters, lr=0.05)

    here = trainees(2, frozen)
    together(here, 1)
    names = set(here[0].state._core._spread.named(here[0].state._core._spread.holding()))

    def unfreeze(trainee: Trainee) -> None:
        trainee.optimizer.param_groups[0]["params"][0].requires_grad_(True)

    all_do(here, unfreeze)
    for number in (2, 3):
        together(here, number)
        assert check_copies(here) == 2
    assert set(here[0].state._core._spread.named(here[0].state._core._spread.holding())) > names


def test_an_update_of_copies_counts_no_step_of_the_optimizer_or_its_schedule() -> None:
    here = trainees(2, OPTIMIZERS["AdamW"])
    before = here[0].optimizer.state_dict()["state"][0]["step"].item()
    together(here, 1)
    state = here[0].optimizer.state_dict()
    assert state["state"][0]["step"].item() == before + 1
    assert here[0].schedule.last_epoch == 2


class Replacing(torch.optim.SGD):
    """Puts a new tensor in the place of its state's in each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                with torch.no_grad():
                    parameter -= group["lr"] * state["mean"]


def test_an_optimizer_may_replace_the_tensors_of_its_state() -> None:
    here = trainees(2, lambda parameters: Replacing(parameters, lr=0.05))
    for number in range(1, 4):
        together(here, number)
        assert check_copies(here) == 2


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_around_the_step_are_refused_before_the_step(register: str) -> None:
    here = trainees(2, OPTIMIZERS["AdamW"])
    for trainee in here:
        getattr(trainee.optimizer, register)(lambda optimizer, args, kwargs: None)
    text = r"AdamW has hooks around its step.* redundancy=1"
    with pytest.raises(UnsupportedOp, match=text):
        here[0].state._core.check_round_trip()  # as `session.steps` does
    with pytest.raises(UnsupportedOp, match=text):
        together(here, 1)


def test_a_step_of_the_object_itself_is_refused_and_a_scheduler_is_not() -> None:
    here = trainees(2, OPTIMIZERS["AdamW"])
    assert "step" in vars(here[0].optimizer), "the scheduler has put its own there"
    here[0].state._core.check_round_trip()
    here[0].optimizer.step = lambda: None
    with pytest.raises(UnsupportedOp, match=r"this AdamW has a step\(\) of its own"):
        here[0].state._core.check_round_trip()


class Decaying(torch.optim.SGD):
    """Its learning rate is a tensor, which each step changes in place."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["lr"].mul_(0.5)


def test_an_update_of_copies_changes_no_setting() -> None:
    def decaying(groups: Any) -> Any:
        optimizer = Decaying(groups, lr=0.05)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.5)
        return optimizer

    here = [Trainee(Group(mesh, SOON), decaying, schedules=False) for mesh in local_meshes(2)]
    form(here, 1)
    together(here, 0)
    take_copies(here)
    for number in range(1, 4):
        together(here, number)
        assert check_copies(here) == 2
    assert here[0].optimizer.param_groups[0]["lr"].item() == 0.5**5


def test_hooks_around_the_steps_of_all_optimizers_run_once_a_step() -> None:
    here = trainees(2, OPTIMIZERS["AdamW"])
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
    try:
        together(here, 1)
    finally:
        handle.remove()
    assert sorted(map(id, seen)) == sorted(id(trainee.optimizer) for trainee in here)
    assert check_copies(here) == 2
