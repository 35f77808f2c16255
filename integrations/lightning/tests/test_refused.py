"""The strategy refuses features that it does not support, and says why."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from torchmetrics import MeanMetric
from torchmetrics.wrappers import Running

from paceline.errors import UnsupportedOp
from paceline_lightning import PacelineStrategy

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore"),  # Lightning's own
]

NUMBERS = [torch.ones(2)] * 12


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter(NUMBERS)


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Searching(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Remembering(Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = Running(MeanMetric(), window=3)


class AddingUp(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))


class LeavingOut(Callback):  # type: ignore[misc]
    def on_train_batch_start(self, *args: Any) -> Any:
        return None


def fit(folder: Path, module: Any = None, loader: Any = None, callbacks: Any = (), **asked: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        strategy=PacelineStrategy(),
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        default_root_dir=folder,
        **asked,
    )
    trainer.fit(module or Module(), DataLoader(NUMBERS, 4) if loader is None else loader)
    return trainer


def test_what_is_not_refused_trains(tmp_path: Path) -> None:
    assert fit(tmp_path, callbacks=[LeavingOut()]).global_step == 3


@pytest.mark.parametrize(
    ("reason", "asked"),
    [
        ("GradientAccumulationScheduler", {"callbacks": [GradientAccumulationScheduler({0: 2})]}),
        ("StochasticWeightAveraging", {"callbacks": [StochasticWeightAveraging(0.1)]}),
        ("train_time_interval", {"callbacks": [ModelCheckpoint(train_time_interval=timedelta(minutes=1))]}),
        ("reload_dataloaders", {"reload_dataloaders_every_n_epochs": 1}),
        ("MetricTracker, Running", {"module": Remembering()}),
        ("LBFGS", {"module": Searching()}),
        ("made no update", {"module": AddingUp()}),
        ("a loader of Stream", {"loader": DataLoader(Stream(), 4)}),
        ("several at once", {"loader": [DataLoader(NUMBERS, 4), DataLoader(NUMBERS, 4)]}),
        ("as torch.s does, and Tensor does not", {"loader": NUMBERS}),
        (
            "another order each time",
            {
                "loader": DataLoader(
                    NUMBERS, 4, sampler=WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator())
                )
            },
        ),
    ],
)
def test_it_is_refused(reason: str, asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOp, match=reason):
        fit(tmp_path, **asked)
