"""Measures the cost of a step in microbatches beside the same step without them, in turns, in the same processes.

    python bench/same_bits_cost.py --model mlp --world 4 --microbatches 8

Each worker trains three copies of a model by turns, a step each: `plain` takes its share of the batch at once, `slices`
accumulates as many slices of it as the rank has microbatches (`no_sync`), `microbatches` takes these. So `slices` to
`plain` is what smaller products cost, and `microbatches` to `slices` what the fixed order of sums costs. Times are
processor seconds of all threads, the mean of the workers, which depend less than the clock on what else the machine
does. The model "mlp" is of NumPy, "cnn" and "lm" are of torch.
"""

from __future__ import annotations

import abc
import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import paceline
from paceline._base.sum_order import EVEN
from paceline._microbatch.attempt import StepAttempt
from paceline._microbatch.rank_plan import usual_plan

KINDS = ("plain", "slices", "microbatches")


class NumpyCase:
    """Three layers of 1,024, 2.9 M parameters, and 1,024 samples in a step."""

    batch = 1024

    def __init__(self, group: Any) -> None:
        from paceline import nn

        rng = np.random.default_rng(0)
        sizes = [784, 1024, 1024, 1024, 10]
        layers: list[Any] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs, rng=rng), nn.ReLU()]
        self._x = rng.standard_normal((self.batch, 784)).astype("f4")
        self._t = rng.integers(0, 10, self.batch)
        self._loss = nn.softmax_cross_entropy
        self.ddp: Any = paceline.DDP(nn.Sequential(*layers[:-1]), group)
        self.optimizer: Any = paceline.optim.SGD(self.ddp, lr=1e-3, momentum=0.9)

    def backward(self, rows: slice, weight: float) -> None:
        _, dy = self._loss(self.ddp(self._x[rows]), self._t[rows])
        self.ddp.backward(dy, weight)


class TorchCase(abc.ABC):
    """A torch model."""

    batch: int

    def __init__(self, group: Any) -> None:
        import torch

        import paceline.torch

        torch.manual_seed(0)
        self._torch = torch
        net, self._x, self._t = self.make()
        self.ddp: Any = paceline.torch.DDP(net, group)
        self.optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-4)

    @abc.abstractmethod
    def make(self) -> tuple[Any, Any, Any]:
        """Net, inputs, labels."""

    def backward(self, rows: slice, weight: float) -> None:
        y = self.ddp(self._x[rows])
        loss = self._torch.nn.functional.cross_entropy(y.flatten(0, -2), self._t[rows].flatten())
        self.ddp.backward(loss, weight)


class Cnn(TorchCase):
    """Convolutions on 128 images of 32 x 32 in a step, 0.6 M parameters."""

    batch = 128

    def make(self) -> tuple[Any, Any, Any]:
        torch, nn = self._torch, self._torch.nn
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10),
        )  # fmt: skip
        return net, torch.randn(self.batch, 3, 32, 32), torch.randint(0, 10, (self.batch,))


class Lm(TorchCase):
    """A transformer on 32 windows of 128 characters in a step, 3.2 M parameters."""

    batch = 32

    def make(self) -> tuple[Any, Any, Any]:
        torch, nn = self._torch, self._torch.nn
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        net = nn.Sequential(nn.Embedding(96, 256), body, nn.Linear(256, 96))
        return net, torch.randint(0, 96, (self.batch, 128)), torch.randint(0, 96, (self.batch, 128))


CASES: dict[str, Callable[[Any], Any]] = {"mlp": NumpyCase, "cnn": Cnn, "lm": Lm}


def step(kind: str, case: Any, group: Any, microbatches: int) -> None:
    """One step of one kind."""
    batch, plan = case.batch, usual_plan(group.rank, group.size, microbatches)
    attempt = StepAttempt(plan)
    case.optimizer.zero_grad()
    if kind == "plain":
        lo, hi = group.rank * batch // group.size, (group.rank + 1) * batch // group.size
        case.backward(slice(lo, hi), (hi - lo) / batch)
    for turn in attempt.turns() if kind != "plain" else ():
        number = turn.number
        lo, hi = number * batch // microbatches, (number + 1) * batch // microbatches
        if kind == "microbatches":
            attempt.enter(turn)
            group._core.set_order(turn)
            case.backward(slice(lo, hi), (hi - lo) / batch)
            attempt.leave(turn, whole=True)
        elif not turn.is_last:
            with case.ddp.no_sync():
                case.backward(slice(lo, hi), (hi - lo) / batch)
        else:
            case.backward(slice(lo, hi), (hi - lo) / batch)
    group._core.set_order(EVEN)
    case.optimizer.step()


def work(model: str, microbatches: int, rounds: int) -> None:
    """A worker; rank 0 prints."""
    with paceline.join() as session:
        group = session.group
        cases = {kind: CASES[model](group) for kind in KINDS}
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 3):
            for turn in range(len(KINDS)):
                kind = KINDS[(number + turn) % len(KINDS)]
                group.barrier()
                start = time.process_time()
                step(kind, cases[kind], group, microbatches)
                group.barrier()
                if number >= 3:
                    times[kind].append(float(group.all_reduce(np.float64(time.process_time() - start))) / group.size)
        if group.rank == 0:
            medians = {kind: statistics.median(found) for kind, found in times.items()}
            # Rounds are compared with themselves, because other work on the machine slows down whole rounds.
            ratios = {
                name: statistics.median(b / a for a, b in zip(times[of], times[kind], strict=True))
                for name, kind, of in (
                    ("microbatches/plain", "microbatches", "plain"),
                    ("slices/plain", "slices", "plain"),
                    ("microbatches/slices", "microbatches", "slices"),
                )
            }
            shown = "  ".join(f"{kind} {1e3 * value:.1f} ms" for kind, value in medians.items())
            more = "  ".join(f"{name} {100 * (value - 1):+.1f} %" for name, value in ratios.items())
            print(f"{model}, W={group.size}, V={microbatches}: {shown}; {more}", flush=True)


def main() -> None:
    """Starts workers, or is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(CASES), default="mlp")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--worker", action="store_true", help="for the workers")
    wanted = parser.parse_args()
    if wanted.worker:
        work(wanted.model, wanted.microbatches, wanted.rounds)
        return
    own = [__file__, *sys.argv[1:], "--worker"]
    raise SystemExit(subprocess.call([sys.executable, "-m", "paceline", "run", "-n", str(wanted.world), *own]))


if __name__ == "__main__":
    main()
