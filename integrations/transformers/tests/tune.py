"""Trains a small GPT-2 from a config, as a user's script would; tests say how by a variable of the environment.

It prints what is logged, each step, and at its end the digest of the weights, each with its process.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from paceline_transformers import ElasticTrainer

ASKED: dict[str, Any] = json.loads(os.environ["ASKED"])
"""Training arguments, and:

host: use transformers' own Trainer.
bits: the same bits on any number of workers.
resume: go on from the last checkpoint.
pace: seconds that a step takes at least; so that a worker can come back in time.
strike: where, in which step and with which rank a worker is killed once: ["evaluation", 4, 0]; or ["begin", 0, 2], for
    the first step that rank 2 begins.
workers: how many must have started before the first step.
ignores: the model takes the number of items that its loss should be divided by, and ignores it.
stops: stop early, after the second evaluation.
raises: the last sample that can be read.
dropout: its probability.
"""

FOLDER = Path(ASKED["arguments"]["output_dir"])

text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
samples = torch.frombuffer(bytearray(text), dtype=torch.uint8)[:9600].long().unfold(0, 16, 16)


def say(words: str) -> None:
    """Prints a line that begins with this process."""
    print(f"pid {os.getpid()} {words}", flush=True)


def is_told(name: str) -> bool:
    """Whether a value of the log is the same in every run."""
    return "second" not in name and "runtime" not in name


class Texts(torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples of 16 bytes, each with its labels; some have fewer of them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index > ASKED.get("raises", len(samples)):
            raise LookupError("no such text")
        labels = self.rows[index].clone()
        if not ASKED.get("ignores"):
            labels[: index % 7] = -100
        return {"input_ids": self.rows[index], "labels": labels}


class Ignoring(GPT2LMHeadModel):  # type: ignore[misc]
    """As many models of transformers: BertForSequenceClassification is one."""

    def forward(self, input_ids: Any = None, labels: Any = None, **ignored: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels)


class Service(TrainerCallback):  # type: ignore[misc]
    """Connects to a service as those of transformers do: once, and only in the process that logs."""

    __module__ = "transformers.integrations"
    _initialized = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._initialized:
            self._initialized = True
            if state.is_world_process_zero:
                self.logged: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            self.logged.append(logs)


class Told(TrainerCallback):  # type: ignore[misc]
    """Prints what is logged, and each step; kills its worker where the test says."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "train_runtime" not in logs:
            told = {name: float(value).hex() for name, value in logs.items() if is_told(name)}
            say(f"logs {json.dumps({'step': state.global_step, **told})}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        while len([*FOLDER.glob("here-*")]) < ASKED.get("workers", 1):
            time.sleep(0.05)
        if args.process_index == 2:  # there are three of them
            strike("begin", 0, args)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        strike("step", state.global_step + 1, args)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say(f"made step {state.global_step}")
        time.sleep(ASKED.get("pace", 0.0))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        strike("evaluation", state.global_step, args)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        strike("save", state.global_step, args)


def strike(where: str, step: int, args: Any) -> None:
    """Kills this process, if that is asked and none was killed before."""
    if [where, step, args.process_index] == ASKED.get("strike"):
        try:
            (FOLDER / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def accuracy(prediction: Any) -> dict[str, float]:
    """Returns the share of bytes that the model predicts."""
    guessed, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean()), "rows": float(len(labels))}


def main() -> None:
    """Trains."""
    torch.manual_seed(0)
    rate = ASKED.get("dropout", 0.0)
    sizes = {"vocab_size": 256, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = (Ignoring if ASKED.get("ignores") else GPT2LMHeadModel)(
        GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_pdrop=rate, embd_pdrop=rate, resid_pdrop=rate)
    )
    arguments = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 12,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 4,
        "per_device_eval_batch_size": 8,
        **ASKED["arguments"],
    }
    trainer = (Trainer if ASKED.get("host") else ElasticTrainer)(
        model,
        TrainingArguments(**arguments, report_to=[], use_cpu=True, disable_tqdm=True, seed=3),
        # The last step of an epoch has 6 samples. A model that ignores their number gets whole steps only: its loss is
        # a mean over each batch, and the Trainer gives a short batch as much weight as a full one.
        train_dataset=Texts(samples[: 112 if ASKED.get("ignores") else 118]),
        eval_dataset=Texts(samples[500:]),
        compute_metrics=accuracy,
        callbacks=[Told(), Service(), *([EarlyStoppingCallback(1, 10.0)] if ASKED.get("stops") else [])],
    )
    trainer.same_bits = bool(ASKED.get("bits"))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"here-{os.getpid()}").touch()
    trainer.train(resume_from_checkpoint=ASKED.get("resume"))
    weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
    history = trainer.state.log_history
    say(f"ends at step {trainer.state.global_step} with {weights.hexdigest()[:16]} and {len(history)} lines of history")


if __name__ == "__main__":
    main()
