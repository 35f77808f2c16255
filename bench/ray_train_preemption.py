"""Times a run of Ray Train in which four workers are killed: Ray's own way beside `paceline_ray.PacelineConfig`.

    python bench/ray_train_preemption.py --rounds 3

It needs the group `ray` of pyproject.toml. It follows Ray's preemption benchmark (ray-project/ray#65047, the arm
without a notice) at a size that fits two cores: two workers train a small ViT on images made up; the number of steps is
four times that between checkpoints; four times a worker gets SIGKILL in the middle of a step, at a fixed one or, with
Paceline, once there are two workers again. Ray's way is `TorchTrainer` with torch's DDP over Gloo: all workers start
again from the last checkpoint. Both arms take turns, with the same model, batches, optimizer and checkpoints, and Ray
polls the workers every 2 s, its default. The script ends with an error if the arms' last losses differ.

Printed are, for each arm:

- steps begun, and how many of them were thrown away (in #65047 `wasted_steps`): how often a step was begun beyond once;
- seconds from the beginning of the first step to the end of the last one;
- goodput: steps times the time of a quiet step, over these seconds. Both arms are measured by the same quiet step: the
  median of those before the first kill, in the arm in which it is less;
- seconds from each kill to the end of the first step that had not been done before it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import paceline
import paceline.torch
import paceline_ray

BATCH, WORKERS = 16, 2
KILLED = (0.3, 0.43, 0.58, 0.83)
"""The steps at which workers are killed, as parts of all steps. On average half of an interval between checkpoints is
lost in Ray's own way; with these the four lose 1.56 intervals, and in #65047 they lost 1.29."""


class ViT(nn.Module):
    """A vision transformer for images of 64 x 64 pixels, in patches of 8 x 8; 2.8 M parameters."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.places = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        logits: torch.Tensor = self.head(self.layers(x).mean(1))
        return logits


class Diary:
    """The events of one process, in a file of its own."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._file = (self._folder / f"{os.getpid()}.told").open("a", buffering=1)

    def tell(self, event: str, **facts: Any) -> None:
        """Writes a line, which a SIGKILL leaves whole."""
        self._file.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")

    def die_once(self, number: int, kills: list[int]) -> None:
        """Kills this process, if one is due and has not been done."""
        for kill in kills:
            if number >= kill:
                with suppress(FileExistsError):
                    (self._folder / f"killed {kill}").touch(exist_ok=False)
                    self.tell("kill", step=number)
                    os.kill(os.getpid(), signal.SIGKILL)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the model, the same each time, and its optimizer."""
    torch.manual_seed(0)
    model = ViT()
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def batch(number: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a worker's part of a step's batch."""
    generator = torch.Generator().manual_seed(number)
    classes = torch.randint(0, 10, (BATCH,), generator=generator)
    images = torch.randn(BATCH, 3, 64, 64, generator=generator) + classes.view(-1, 1, 1, 1) / 10
    return images[rank::world], classes[rank::world]


def train_rays_way(config: dict[str, Any]) -> None:
    """Trains with torch's DDP, and continues from Ray's last checkpoint."""
    diary, rank = Diary(config["folder"]), ray.train.get_context().get_world_rank()
    net, optimizer = make()
    first = 1
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt")
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    model = prepare_model(net)
    for number in range(first, config["total"] + 1):
        diary.tell("begun", step=number, attempt=os.getpid() if rank == 0 else None)
        images, classes = batch(number, rank, WORKERS)
        loss = nn.functional.cross_entropy(model(images), classes)
        if rank == 1:
            diary.die_once(number, config["kills"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / WORKERS
        torch.distributed.all_reduce(mean)
        diary.tell("done", step=number, loss=mean.item(), world=WORKERS)
        if number % config["every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
                    torch.save(state, f"{folder}/state.pt")
                ray.train.report({"step": number}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def train_with_paceline(config: dict[str, Any]) -> None:
    """Trains in elastic steps."""
    diary = Diary(config["folder"])
    with paceline.join() as session:
        net, optimizer = make()
        model = paceline.torch.DDP(net, session.group)
        state = paceline.TrainState(model=model, optimizer=optimizer)
        for step in session.steps(state, total=config["total"]):
            mean = np.zeros(())
            with step:
                diary.tell("begun", step=step.number, attempt=step.generation)
                images, classes = batch(step.number, step.rank, step.world)
                step.count(len(images) / BATCH, of=model)
                loss = nn.functional.cross_entropy(model(images), classes)
                if step.rank == step.world - 1 > 0:
                    diary.die_once(step.number, config["kills"])
                optimizer.zero_grad()
                loss.backward()
                mean = session.group.all_reduce(np.array(loss.item() * step.weight))
                optimizer.step()
            if step.applied:
                diary.tell("done", step=step.number, loss=float(mean), world=step.world)

            def save(folder: Path, number: int = step.number) -> None:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
                torch.save(state, folder / "state.pt")

            if step.number % config["every"] == 0:
                paceline_ray.report(session, step, {"step": step.number}, save)


ARMS = {
    "Ray's own way": (train_rays_way, lambda: TorchConfig(backend="gloo")),
    "PacelineConfig": (train_with_paceline, lambda: paceline_ray.PacelineConfig(min=1)),
}


def events_of(folder: str) -> Iterator[dict[str, Any]]:
    """Yields what all processes have told."""
    for file in Path(folder).glob("*.told"):
        yield from map(json.loads, file.read_text().splitlines())


def measure(arm: str, total: int) -> dict[str, Any]:
    """Trains once and returns what is printed."""
    train, backend = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        config = {"folder": folder, "total": total, "every": total // 4, "kills": [round(total * at) for at in KILLED]}
        TorchTrainer(
            train,
            train_loop_config=config,
            torch_config=backend(),
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=f"{folder}/stored", failure_config=FailureConfig(max_failures=-1)),
        ).fit()
        events = sorted(events_of(folder), key=lambda event: event["at"])
    done = [event for event in events if event["event"] == "done"]
    kills = [event for event in events if event["event"] == "kill"]
    begun = {(each["step"], each["attempt"]) for each in events if each["event"] == "begun" and each["attempt"]}
    assert len(kills) == len(KILLED), "training ended before a replacement came that was to be killed: take more steps"
    assert {step for step, _ in begun} == {event["step"] for event in done} == set(range(1, total + 1))
    ends = [min(event["at"] for event in done if event["step"] == step) for step in range(1, total + 1)]
    quiet = statistics.median(b - a for a, b in pairwise(ends[: kills[0]["step"] - 1]))
    seconds = max(event["at"] for event in done) - events[0]["at"]
    return {
        "begun": len(begun),
        "wasted": len(begun) - total,
        "seconds": seconds,
        "step": quiet,
        "gaps": [min(at for at in ends if at > kill["at"]) - kill["at"] for kill in kills],
        "alone": len({event["step"] for event in done if event["world"] < WORKERS}),
        "loss": done[-1]["loss"],
    }


def main() -> None:
    """Runs all arms in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    ray.init(num_cpus=WORKERS, log_to_driver=False, logging_level="error")
    for number in range(asked.rounds):
        found = {arm: measure(arm, asked.steps) for arm in ARMS}
        quiet = min(each["step"] for each in found.values())
        for arm, each in found.items():
            goodput, gaps = asked.steps * quiet / each["seconds"], " ".join(f"{gap:.1f}" for gap in each["gaps"])
            print(
                f"{number + 1} {arm:14} begun {each['begun']}, wasted {each['wasted']}, {each['seconds']:.1f} s, "
                f"goodput {goodput:.0%}, quiet step {1000 * each['step']:.0f} ms, kill to new step {gaps} s, "
                f"{each['alone']} steps with one worker less",
                flush=True,
            )
        one, other = (each["loss"] for each in found.values())
        assert abs(one - other) < 1e-3 * abs(one) + 1e-3, (one, other)


if __name__ == "__main__":
    main()
