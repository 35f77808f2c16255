"""Times steps of the Trainer, Lightning and accelerate beside those of a loop written by hand, on two workers.

    python bench/trainer_overhead.py --rounds 6

It needs transformers, Lightning and accelerate. All train the same GPT-2 on the same samples, with the same optimizer,
schedule and clipping.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from typing import Any

WIDTH, LAYERS, WINDOW, BATCH = 96, 3, 64, 16
"""0.4 M parameters; samples of a step, over both workers."""
SETTINGS = {"max_steps": 80, "learning_rate": 1e-3, "logging_steps": 10}


def model_and_samples() -> tuple[Any, list[dict[str, Any]]]:
    """Returns a model that is the same each time, and samples of random bytes."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": WINDOW, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    rows = torch.randint(256, (512, WINDOW))
    return GPT2LMHeadModel(GPT2Config(**sizes)), [{"input_ids": row, "labels": row} for row in rows]


def optimizer_and_schedule(model: Any) -> tuple[Any, Any]:
    """Returns what the Trainer would make."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS["learning_rate"], weight_decay=0.0, fused=True)
    return optimizer, get_linear_schedule_with_warmup(optimizer, 0, int(SETTINGS["max_steps"]))


def train_with_trainer() -> list[float]:
    """Returns when each step ended."""
    from transformers import TrainerCallback, TrainingArguments

    from paceline_transformers import ElasticTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    model, samples = model_and_samples()
    args = TrainingArguments(
        "/tmp/unused",
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **SETTINGS,
    )
    ElasticTrainer(model, args, train_dataset=samples, callbacks=[Clock()]).train()
    return ends


def train_with_lightning() -> list[float]:
    """Returns when each step ended."""
    import lightning
    import torch
    from transformers import default_data_collator

    from paceline_lightning import PacelineStrategy

    ends: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            ends.append(time.perf_counter())

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    model, samples = model_and_samples()
    trainer = lightning.Trainer(
        max_steps=int(SETTINGS["max_steps"]),
        strategy=PacelineStrategy(),
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        log_every_n_steps=int(SETTINGS["logging_steps"]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(samples, BATCH, collate_fn=default_data_collator)  # type: ignore[arg-type]
    trainer.fit(Module(model.train()), loader)
    return ends


def train_with_accelerate() -> list[float]:
    """Returns when each step ended."""
    import torch
    from accelerate import Accelerator
    from transformers import default_data_collator

    from paceline_accelerate import Steps

    ends: list[float] = []
    model, samples = model_and_samples()
    loader = torch.utils.data.DataLoader(samples, BATCH, collate_fn=default_data_collator)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule, loader = accelerator.prepare(model.train(), *optimizer_and_schedule(model), loader)
    last, every = int(SETTINGS["max_steps"]), int(SETTINGS["logging_steps"])
    with Steps(accelerator, model, optimizer, loader, schedule, epochs=last, max_steps=last) as steps:
        for _ in steps.epochs():
            for batch in steps:
                with steps.step:
                    accelerator.backward(model(**batch).loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if steps.number % every == 0:
                    accelerator.log({"loss": steps.loss}, step=steps.number)
                ends.append(time.perf_counter())
    return ends


def train_by_hand() -> list[float]:
    """Returns when each step ended."""
    from transformers import default_data_collator

    import paceline
    import paceline.torch

    model, samples = model_and_samples()
    ends: list[float] = []
    with (
        paceline.torch.ElasticDataLoader(samples, collate_fn=default_data_collator) as loader,
        paceline.join() as session,
    ):
        ddp = paceline.torch.DDP(model, session.group)
        optimizer, schedule = optimizer_and_schedule(model)
        sampler = paceline.ElasticSampler(len(samples), BATCH)
        state = paceline.TrainState(model=ddp, optimizer=optimizer, schedule=schedule, sampler=sampler)
        model.train()
        for step in session.steps(state, total=int(SETTINGS["max_steps"])):
            with step:
                optimizer.zero_grad()
                ddp.backward(ddp(**loader.batch(step)).loss, step.weight)
                ddp.clip_grad_norm(1.0)
                optimizer.step()
                schedule.step()
                ends.append(time.perf_counter())
    return ends


def main() -> None:
    """Compares; or trains one way, if the environment names it."""
    ways = {
        "trainer": train_with_trainer,
        "lightning": train_with_lightning,
        "accelerate": train_with_accelerate,
        "by hand": train_by_hand,
    }
    if way := os.environ.get("WAY"):
        ends = ways[way]()
        took = [after - before for before, after in itertools.pairwise(ends[10:])]
        print(f"median {statistics.median(took) * 1e3:.3f} ms", flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            command = [sys.executable, "-m", "paceline", "run", "-n", "2", __file__]
            said = subprocess.run(command, env={**os.environ, "WAY": way}, capture_output=True, text=True, check=True)
            found[way].append(max(map(float, re.findall(r"median ([\d.]+) ms", said.stdout))))
    for way, medians in found.items():
        print(f"{way}: {statistics.median(medians):.2f} ms a step, median of {rounds} runs")
    for way in ("trainer", "lightning", "accelerate"):
        ratios = [one / other for one, other in zip(found[way], found["by hand"], strict=True)]
        print(f"{way}: ratio of pairs {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
