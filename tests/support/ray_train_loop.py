"""The training functions of tests with Ray Train, and the same without Paceline. Workers import this."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch

import paceline
import paceline.torch
import paceline_ray

__all__ = ["EVERY", "Heard", "alone", "broken", "dies_as_a_whole", "loses_a_third", "loses_workers"]

EVERY = 5
"""Steps between two checkpoints."""

_BATCH = 12


class Heard(ray.train.UserCallback):  # type: ignore[misc]
    """Writes down what Ray's controller hears of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Called in the controller."""
        with (self._folder / "heard").open("a") as file:
            path = None if checkpoint is None else checkpoint.path
            file.write(json.dumps({**metrics[0], "checkpoint": path}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All reports, in order."""
        return [json.loads(line) for line in (self._folder / "heard").read_text().splitlines()]


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(_BATCH, 4, generator=torch.Generator().manual_seed(number))
    return x, (x.sum(1) > 0).long()


def alone(total: int) -> Iterator[tuple[float, Mapping[str, torch.Tensor]]]:
    """Trains in this process, without Paceline and Ray; yields the loss of each step and the weights after it."""
    model = _model()
    optimizer = _optimizer(model)
    for number in range(1, total + 1):
        x, t = _batch(number)
        loss = torch.nn.functional.cross_entropy(model(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), {name: value.clone() for name, value in model.state_dict().items()}


def _once(folder: Path, name: str) -> bool:
    """True for the first process that asks."""
    with suppress(FileExistsError):
        (folder / name).touch(exist_ok=False)
        return True
    return False


def _die(session: paceline.Session, survivor: int = -1) -> None:
    """Kills all processes of the view but for that of the survivor, and this one last."""
    for pid in sorted({peer.pid for peer in session.members} - {survivor}, key=os.getpid().__eq__):
        os.kill(pid, signal.SIGKILL)


def _steps(session: paceline.Session, total: int, **options: Any) -> Iterator[tuple[Any, torch.nn.Module, float]]:
    """Yields each step behind its block, with the loss over the whole batch."""
    net = _model()
    model = paceline.torch.DDP(net, session.group)
    optimizer = _optimizer(net)
    state = paceline.TrainState(model=model, optimizer=optimizer)
    for step in session.steps(state, total=total, **options):
        loss = np.zeros(())
        with step:
            x, t = (rows[step.rank :: step.world] for rows in _batch(step.number))
            step.count(len(x) / _BATCH, of=model)
            mean = torch.nn.functional.cross_entropy(model(x), t)
            optimizer.zero_grad()
            mean.backward()
            loss = session.group.all_reduce(np.array(mean.item() * step.weight))
            optimizer.step()
        yield step, net, float(loss)


def loses_workers(config: Mapping[str, str]) -> int:
    """Rank 0 of three dies while it saves; when it is replaced, the others die at once, but for the one that saved.

    Training ends when they are replaced.
    """
    folder, survivor = Path(config["folder"]), Path(config["folder"], "survivor")
    with paceline.join() as session:
        whole = times = 0  # steps of three workers since the last death, and how often there were three of them
        for step, net, loss in _steps(session, 1_000_000):
            whole = whole + 1 if step.world == 3 else 0

            def save(to: Path, net: torch.nn.Module = net) -> None:
                (to / "begun").touch()
                if _once(folder, "one died"):
                    os.kill(os.getpid(), signal.SIGKILL)
                torch.save(net.state_dict(), to / "weights.pt")
                if not survivor.exists():
                    survivor.write_text(str(os.getpid()))

            report = {"step": step.number, "loss": loss, "pid": os.getpid()}
            paceline_ray.report(session, step, report, save if step.number % EVERY == 0 else None)
            if survivor.exists() and whole == 3:
                times += 1
                if int(survivor.read_text()) == os.getpid():
                    if times == 2:
                        session.stop()
                elif _once(folder, "two died"):
                    _die(session, int(survivor.read_text()))
            if step.world < 3:
                time.sleep(0.1)  # there are few steps until the replacement comes
    return os.getpid()


def loses_a_third(config: Mapping[str, str]) -> None:
    """Two of four workers die at once, and another one while Ray starts the first replacement, which takes seconds.

    Training ends when there are four of them again.
    """
    folder = Path(config["folder"])
    with paceline.join() as session:
        for step, _, _ in _steps(session, 1_000_000):
            if step.world < 4:
                time.sleep(0.1)  # there are few steps until the replacements come
            elif step.applied and step.rank == 0 and step.number >= 3:
                if _once(folder, "died"):
                    (folder / "survivor").write_text(str(os.getpid()))
                    one, two, three = (peer.pid for peer in session.members if peer.pid != os.getpid())
                    subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -9 {three}"], start_new_session=True)
                    os.kill(one, signal.SIGKILL)
                    os.kill(two, signal.SIGKILL)
                else:
                    session.stop()
    if (folder / "survivor").read_text() == str(os.getpid()):
        (folder / "ended").write_text(str(os.getpid()))


def dies_as_a_whole(config: Mapping[str, str]) -> int:
    """All three workers die behind step 13, once; there is a checkpoint of step 10."""
    folder = Path(config["folder"])
    with paceline.join() as session:
        for step, _, loss in _steps(session, 20, checkpoint_dir=folder / "checkpoints", checkpoint_every=10):
            paceline_ray.report(session, step, {"step": step.number, "loss": loss, "pid": os.getpid()})
            if step.number == 13 and _once(folder, "all died"):
                _die(session)
    return os.getpid()


def broken(config: Mapping[str, str]) -> None:
    """Rank 1 raises an error of its own, because of one of Ray's."""
    with paceline.join() as session:
        for step, _, _ in _steps(session, 1_000_000):
            if step.number == 3 and step.rank == 1:
                try:
                    ray.train.report({"loss": 1.0})
                except RuntimeError as error:
                    raise ValueError("the user's code failed") from error  # this line
