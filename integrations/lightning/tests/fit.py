"""Trains a small classifier of images with Lightning, as a user's script would; tests say how by a variable.

It prints each step, and at its end the digest of the weights and the metrics, each with its process.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import paceline_lightning

ASKED: dict[str, Any] = json.loads(os.environ["ASKED"])
"""Arguments of the Trainer, and:

folder: where logs and checkpoints go.
host: leave the strategy to Lightning.
manual: a module with two optimizers that it steps itself.
collects: the module keeps the outputs of validation batches itself.
resume: the checkpoint to go on from.
pace: seconds that a batch takes at least; so that a worker can come back in time.
strike: where, in which step and with which rank a worker is killed once: ["validation", 4, 0].
workers: how many must have started before the first step.
stops: stop early.
raises: the last sample that can be read.
shuffles: shuffle the samples.
rows: samples of a batch.
fetching: processes that read samples.
timer: the step after which one worker alone asks to stop.
"""

FOLDER = Path(ASKED["folder"])
STRATEGY = paceline_lightning.PacelineStrategy.strategy_name


def say(words: str) -> None:
    """Prints a line that begins with this process."""
    print(f"pid {os.getpid()} {words}", flush=True)


class Images(Dataset):  # type: ignore[misc]
    """Images of 8 x 8 points in 4 classes: a bright spot in one of the quarters, and noise."""

    def __init__(self, count: int, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.classes = torch.randint(0, 4, (count,), generator=numbers)
        self.images = torch.randn(count, 1, 8, 8, generator=numbers)
        for image, number in zip(self.images, self.classes.tolist(), strict=True):
            row, column = 4 * (number // 2), 4 * (number % 2)
            image[0, row : row + 4, column : column + 4] += 0.5

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index > ASKED.get("raises", len(self)):
            raise LookupError("no such image")
        return self.images[index], self.classes[index]


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8})
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
        )
        self.accuracy, self.val_accuracy = MulticlassAccuracy(4), MulticlassAccuracy(4)
        self.val_area = MulticlassAUROC(4, thresholds=None)  # it keeps all predictions in lists

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, classes = batch
        guessed = self(images)
        loss = functional.cross_entropy(guessed, classes)
        self.accuracy(guessed, classes)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("peak", guessed.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        strike("validation", self.global_step, self.trainer.global_rank)
        images, classes = batch
        guessed = self(images)
        self.val_accuracy(guessed, classes)
        self.val_area(guessed, classes)
        self.log("val_loss", functional.cross_entropy(guessed, classes))
        self.log("val_rows", float(len(images)), reduce_fx="sum")
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_area", self.val_area)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Collecting(Classifier):
    """Keeps outputs of validation itself, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(self(batch[0]).argmax(1) == batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("val_collected", torch.cat(self.outputs).float().mean())
        self.outputs.clear()


class Manual(Classifier):
    """Updates its convolution and its linear layer apart, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = []
        for optimizer in self.optimizers():
            loss = functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            losses.append(loss)
        self.log_dict({"loss": losses[0], "second_loss": losses[1]}, on_step=True, on_epoch=True)
        return losses[0]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers[0].parameters(), 0.05), torch.optim.SGD(self.layers[3].parameters(), 0.05)]


class Told(Callback):  # type: ignore[misc]
    """Prints each step, and kills its worker where the test says."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        while len([*FOLDER.glob("here-*")]) < ASKED.get("workers", 1):
            time.sleep(0.05)
        time.sleep(ASKED.get("pace", 0.0))
        assert module.training  # also after a validation that was interrupted
        strike("batch", trainer.global_step, trainer.global_rank)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = float(outputs["loss"]).hex()
        say(f"made batch {trainer.fit_loop.total_batch_idx} of step {trainer.global_step} with {loss}")
        strike("after", trainer.global_step, trainer.global_rank)
        if trainer.global_step == ASKED.get("timer") and trainer.global_rank == 1:
            trainer.should_stop = True

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        strike("save", trainer.global_step, trainer.global_rank)


def strike(where: str, step: int, rank: int) -> None:
    """Kills this process, if that is asked and none was killed before."""
    if [where, step, rank] == ASKED.get("strike"):
        try:
            (FOLDER / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Trains."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"here-{os.getpid()}").touch()
    lightning.seed_everything(7, verbose=False)
    module = Manual() if ASKED.get("manual") else Collecting() if ASKED.get("collects") else Classifier()
    arguments = {
        "max_epochs": 2,
        "accumulate_grad_batches": 1 if ASKED.get("manual") else 2,
        "gradient_clip_val": None if ASKED.get("manual") else 1.0,
        "val_check_interval": 8,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 1,
        "enable_progress_bar": False,
        **ASKED.get("trainer", {}),
    }
    best = ModelCheckpoint(FOLDER / "saved", "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
    callbacks = [
        Told(),
        LearningRateMonitor("step"),
        best,
        ModelCheckpoint(FOLDER / "often", every_n_train_steps=5, save_top_k=-1),
    ]
    if ASKED.get("stops"):
        callbacks.append(EarlyStopping("val_loss", min_delta=10.0, patience=1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="auto" if ASKED.get("host") else STRATEGY,
        logger=CSVLogger(FOLDER / "logs", name="run"),
        callbacks=callbacks,
        **arguments,
    )
    rows = ASKED.get("rows", 8)
    trainer.fit(
        module,
        DataLoader(Images(123, 1), rows, shuffle=bool(ASKED.get("shuffles")), num_workers=ASKED.get("fetching", 0)),
        DataLoader(Images(52, 2), rows),
        ckpt_path=ASKED.get("resume"),
    )
    weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in module.state_dict().values()))
    told = {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())}
    say(f"ends at step {trainer.global_step} of epoch {trainer.current_epoch} with {weights.hexdigest()[:16]}")
    say(f"metrics {json.dumps(told)}")
    say(f"best {Path(best.best_model_path).name} of {sorted(Path(path).name for path in best.best_k_models)}")


if __name__ == "__main__":
    main()
