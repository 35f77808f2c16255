"""Torch modules, optimizers and schedules in a training state: given, taken, undone, kept, without pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch.models import assert_same_bits, built, samples, weights

import paceline
import paceline.torch
from paceline import checkpoint
from paceline.checkpoint.tree import join, split
from paceline.testing import local_groups

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.usefixtures("place")]

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


class Training:
    """A model with buffers, wrapped, an optimizer and a schedule."""

    def __init__(self, kind: str = "adam", dtype: Any = torch.float32, seed: int = 0) -> None:
        nn = torch.nn
        net = built(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(dtype), seed)
        self.model = paceline.torch.DDP(net, local_groups(1)[0])
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.state = paceline.TrainState(model=self.model, optimizer=self.optimizer, schedule=self.schedule)
        x, self._t = samples()
        self._x = x.to(dtype)

    def train(self, steps: int = 1) -> Training:
        for _ in range(steps):
            self.gradients()
            self.optimizer.step()
            self.schedule.step()
        return self

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self._x).float(), self._t).backward()

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "nadam"])
def test_a_loaded_state_trains_on_with_the_bits_of_the_donor(kind: str, dtype: Any) -> None:
    donor, newcomer = Training(kind, dtype).train(3), Training(kind, dtype, seed=9)
    donor.state._core.check_round_trip()
    newcomer.state._core.check_round_trip()
    assert donor.state._core.manifest() == newcomer.state._core.manifest()

    skeleton, arrays = split(donor.state.state_dict())  # as it travels: JSON and arrays
    places = [p.data_ptr() for p in newcomer.model.parameters()]
    newcomer.state.load_state_dict(join(skeleton, arrays))

    assert [p.data_ptr() for p in newcomer.model.parameters()] == places
    assert newcomer.state.fingerprint() == donor.state.fingerprint()
    donor.train(2)
    newcomer.train(2)
    assert_same_bits([weights(donor.model), weights(newcomer.model)])
    assert newcomer.state.fingerprint() == donor.state.fingerprint()
    assert newcomer.lr == donor.lr


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_undo_restores_the_state_before_the_step(kind: str) -> None:
    """What happens before the gate: gradients, buffers, settings."""
    training = Training(kind).train(2)
    before = training.state.fingerprint()

    small = training.state._core.small()
    training.gradients()
    for group in training.optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(7.0)
        else:
            group["lr"] = 7.0
    assert training.state.fingerprint() != before
    training.state._core.undo(small)

    assert training.state.fingerprint() == before
    assert all(p.grad is None for p in training.model.parameters())
    training.train()
    assert_same_bits([weights(training.model), weights(Training(kind).train(3).model)])


def test_the_undo_copy_holds_only_buffers() -> None:
    """Neither parameters nor moments."""
    training = Training("adam").train()
    _, arrays = split(training.state._core.small())
    assert all("running" in path or "num_batches" in path for path in arrays), list(arrays)


def test_a_single_worker_resumes_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COORDINATOR", "JOB", "MIN_WORKERS", "MAX_WORKERS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)

    def run(total: int, seed: int) -> Any:
        training = Training(dtype=torch.bfloat16, seed=seed)
        with paceline.join() as session:
            for step in session.steps(training.state, total=total, checkpoint_dir=tmp_path, checkpoint_every=2):
                with step:
                    training.train()
        return weights(training.model)

    run(4, seed=0)
    assert checkpoint.tags(tmp_path)
    resumed = run(6, seed=9)
    assert_same_bits([resumed, weights(Training(dtype=torch.bfloat16).train(6).model)])


class Gate:
    """Counts who comes through."""

    def __init__(self) -> None:
        self.opened = 0

    def open(self, optimizer: object) -> None:
        self.opened += 1

    def spoil(self) -> None:
        raise AssertionError("the update was interrupted")

    def changed(self) -> None:
        """See `paceline._elastic.state.Gate`."""


def test_optimizer_step_opens_the_gate_once() -> None:
    training, gate = Training(), Gate()
    training.state._core.guard(gate)
    training.train(2)
    late = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
    training.train()
    late.step()
    assert gate.opened == 3
    training.state._core.unguard()
    training.train()
    assert gate.opened == 3


def test_a_state_that_torch_rounds_on_load_is_refused() -> None:
    """NAdam's own `load_state_dict` rounds a product to the parameters' dtype."""
    training = Training("nadam", torch.bfloat16).train(3)
    with pytest.raises(paceline.UnsupportedOp, match=r"differs.*mu_product"):
        training.state._core.check_round_trip()
