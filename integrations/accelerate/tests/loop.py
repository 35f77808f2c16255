"""Trains a small classifier with a loop as in accelerate's documentation; tests say how by a variable.

It prints each step that it makes, and at its end the digest of the weights, with its process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import paceline_accelerate

ASKED: dict[str, Any] = json.loads(os.environ["ASKED"])
"""The settings of a test:

folder: where the log and checkpoints go.
host: train without Paceline.
evaluates: "alone", each worker all samples; "together", each its share.
saves: with accelerate alone, a step that it saves in the middle of an epoch.
resume: the checkpoint to go on from, and the steps that are done by then.
pace: seconds that a batch takes at least; so that a worker can come back in time.
strike: where, in which step and with which rank a worker is killed once: ["evaluation", 12, 0].
stops: that worker is stopped, not killed.
workers: how many must have started before the first step.
raises: the last sample that can be read.
shuffles: shuffle the samples.
rows: samples of a batch.
epochs: 3, unless it says another number.
trigger: the step after which the worker with rank 1 asks to stop.
"""

FOLDER = Path(ASKED["folder"])
EPOCHS = ASKED.get("epochs", 3)


def say(words: str) -> None:
    """Prints a line that begins with this process."""
    print(f"pid {os.getpid()} {words}", flush=True)


class Points(Dataset):  # type: ignore[misc]
    """Points in 6 dimensions, of 3 classes."""

    def __init__(self, count: int, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 6, generator=numbers)
        self.classes = (self.points[:, 0] > 0).long() + (self.points[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index > ASKED.get("raises", len(self)):
            raise LookupError("no such point")
        return {"points": self.points[index], "classes": self.classes[index]}


class Journal(GeneralTracker):  # type: ignore[misc]
    """Writes each log as a line to a file."""

    name = "journal"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.path = FOLDER / "journal"

    @property
    def tracker(self) -> Path:
        return self.path

    def start(self) -> None:
        say("opens the journal")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.log(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, values]) + "\n")


def strike(where: str, step: int) -> None:
    """Kills or stops this process, if that is asked and it happens to none before."""
    if [where, step, accelerator.process_index] == ASKED.get("strike"):
        try:
            (FOLDER / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGSTOP if ASKED.get("stops") else signal.SIGKILL)


def train(batch: Any) -> float:
    """Makes a step, or a part of it, and returns the loss."""
    loss = functional.cross_entropy(model(batch["points"]), batch["classes"])
    accelerator.backward(loss)
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return float(loss.detach())


def evaluate(loader: Any, step: int) -> dict[str, float]:
    """Returns the share of the samples that the model gets right, and their number."""
    right = rows = 0
    widest: list[int] = []
    model.eval()
    for batch in loader:
        strike("evaluation", step)
        with torch.no_grad():
            found = model(batch["points"]).argmax(1)
        found, classes = accelerator.gather_for_metrics((found, batch["classes"]))
        widest += accelerator.gather_for_metrics([f"{each}" for each in batch["classes"].tolist()])
        right += int((found == classes).sum())
        rows += len(found)
    model.train()
    return {"accuracy": right / rows, "rows": float(rows), "named": float(len(widest))}


def train_with_accelerate() -> None:
    """The loop as accelerate's documentation has it."""
    step, losses = 0, []
    accelerator.init_trackers("points", {"rows": 52})
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                losses.append(train(batch))
            if accelerator.sync_gradients:
                step += 1
                accelerator.log({"loss": sum(losses) / len(losses), "rate": scheduler.get_last_lr()[0]}, step=step)
                losses.clear()
                if step == ASKED.get("saves"):
                    accelerator.save_state()
        accelerator.log(evaluate(eval_loader, step), step=step)
        accelerator.save_state()


def train_with_paceline() -> None:
    """The same loop in the steps of a session."""
    done = ASKED.get("resume", [0, 0])[1]
    with paceline_accelerate.Steps(
        accelerator, model, optimizer, loader, scheduler, epochs=EPOCHS, done=done, seed=5
    ) as steps:
        accelerator.init_trackers("points", {"rows": 52})
        while len([*FOLDER.glob("here-*")]) < ASKED.get("workers", 1):
            time.sleep(0.05)
        for _ in steps.epochs():
            for batch in steps:
                with steps.step as step, accelerator.accumulate(model):
                    time.sleep(ASKED.get("pace", 0.0))
                    train(batch)
                    strike("block", steps.number)
                if not accelerator.sync_gradients:
                    continue
                if step.applied:
                    say(f"made step {steps.number} of rank {accelerator.process_index}")
                strike("log", steps.number)
                accelerator.log({"loss": steps.loss, "rate": scheduler.get_last_lr()[0]}, step=steps.number)
                if steps.number == ASKED.get("trigger") and accelerator.process_index == 1:
                    accelerator.set_trigger()
                if "trigger" in ASKED and accelerator.check_trigger():
                    return
            found: dict[str, float] = {}
            if ASKED.get("evaluates") == "together":
                for attempt in steps.retry():
                    with attempt:
                        found = evaluate(steps.share(eval_loader), steps.number)
                        accelerator.log(found, step=steps.number)
            else:
                accelerator.log(evaluate(eval_loader, steps.number), step=steps.number)
            accelerator.save_state()


@contextlib.contextmanager
def killed_while_it_saves() -> Iterator[None]:
    """Inside the block, a checkpoint may be interrupted after its first file."""
    save = torch.save

    def saving(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        strike("save", accelerator.save_iteration)

    torch.save = saving
    try:
        yield
    finally:
        torch.save = save


FOLDER.mkdir(exist_ok=True)
(FOLDER / f"here-{os.getpid()}").touch()
set_seed(7)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    log_with=Journal(),
    project_config=ProjectConfiguration(str(FOLDER), automatic_checkpoint_naming=True),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
loader = DataLoader(Points(115, 1), ASKED.get("rows", 8), shuffle=bool(ASKED.get("shuffles")))
eval_loader = DataLoader(Points(52, 2), 8)
model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(model, optimizer, loader, eval_loader, scheduler)
if "resume" in ASKED:
    accelerator.load_state(ASKED["resume"][0])
    accelerator.project_configuration.iteration = 10
with killed_while_it_saves():
    (train_with_accelerate if ASKED.get("host") else train_with_paceline)()
accelerator.end_training()
weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
say(f"ends with {weights.hexdigest()[:16]}")
