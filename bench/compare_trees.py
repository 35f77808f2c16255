"""Compares a training step of source trees: their workers step in turn, on the same machine in the same run.

    python bench/compare_trees.py OLD NEW [NEWER ...] [--kinds numpy-ddp,torch-fsdp] [--worlds 2,4] [--rounds 30]

OLD, NEW and so on are checkouts. For each kind and world every tree has a coordinator and W workers that live side by
side. In one round each tree takes three steps while the workers of the others wait; every other round goes through the
trees backwards. The model has 12.6 million parameters (12 linear layers of 1,024), the batch 128 samples, and each
worker one thread. The kinds "micro" take whole steps of `session.steps`, with DDP and 8 microbatches. There is a line
for each tree but the first, which compares it with the tree before it: medians over the rounds of the step's time (of
the slowest rank) and CPU time (of all ranks), and of the ratio within a round, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

KINDS = ("numpy-ddp", "numpy-fsdp", "numpy-micro", "torch-ddp", "torch-fsdp", "torch-micro")

_STEPS = 3
_WARM_UP = 5

_COORDINATOR = """
import sys
from paceline.testing import coordinator

with coordinator() as address:
    print(address, flush=True)
    sys.stdin.read()
"""

_WORKER = """
import json, os, sys, time
import numpy as np
import paceline

LAYERS, WIDTH, BATCH = 12, 1024, 128
framework, _, kind = sys.argv[1].partition("-")
say = os.fdopen(os.dup(1), "w", buffering=1)

with paceline.join(timeout=120.0) as session:
    group = session.group
    if framework == "torch":
        import torch
        import paceline.torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        wrap = paceline.torch.FSDP if kind == "fsdp" else paceline.torch.DDP
        model = wrap(net, group, auto_wrap=torch.nn.Linear) if kind == "fsdp" else wrap(net, group)
        x = torch.randn(BATCH, WIDTH)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9) if kind == "micro" else None

        def compute(micro):
            model(x[micro.indices]).square().mean().backward()

        def step():
            model.zero_grad()
            model(x).square().mean().backward()
    else:
        from paceline import nn

        rng = np.random.default_rng(0)
        layers = [nn.Linear(WIDTH, WIDTH, rng=rng) for _ in range(LAYERS)]
        if kind != "fsdp":
            model = paceline.DDP(nn.Sequential(*layers), group)
        else:
            model = paceline.FSDP(nn.Sequential(*(paceline.FSDP(layer, group) for layer in layers)), group)
        x = np.random.default_rng(1).standard_normal((BATCH, WIDTH)).astype(np.float32)
        dy = np.ones_like(x) / len(x)
        parameters = [parameter for _, parameter in model.named_parameters()]
        optimizer = paceline.optim.SGD(model, lr=1e-9) if kind == "micro" else None

        def compute(micro):
            model(x[micro.indices])
            model.backward(dy[micro.indices])

        def step():
            for parameter in parameters:
                parameter.grad = None
            model(x)
            model.backward(dy)

    if kind == "micro":
        word = "microbatches" if hasattr(paceline.Step, "microbatches") else "parts"  # trees before decision 28
        sampler = paceline.ElasticSampler(BATCH, global_batch=BATCH, **{word: 8})
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        steps = session.steps(state, total=1 << 30)

        def step():
            present = next(steps)
            with present:
                optimizer.zero_grad()
                for micro in getattr(present, word):
                    with micro:
                        compute(micro)
                optimizer.step()

    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), file=say)
"""


class Tree:
    """The workers of one source tree.

    Args:
        workers: the processes; each reads a number of steps from stdin, and answers with seconds on stdout.
    """

    def __init__(self, workers: list[subprocess.Popen[str]]) -> None:
        self._workers = workers

    def run(self, steps: int) -> tuple[float, float]:
        """Runs steps; returns the milliseconds of one step of the slowest rank, and of all ranks' CPU time together."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{steps}\n")
            worker.stdin.flush()
        answers = [json.loads(_line(worker)) for worker in self._workers]
        wall, cpu = max(wall for wall, _ in answers), sum(cpu for _, cpu in answers)
        return 1e3 * wall / steps, 1e3 * cpu / steps


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@contextmanager
def _started(code: str, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait()


@contextmanager
def tree_of(folder: Path, kind: str, world: int) -> Iterator[Tree]:
    """Runs the workers of a checkout for the block."""
    path = os.pathsep.join(str(folder / part) for part in ("client", "server", "protocol", "protos"))
    common = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with ExitStack() as stack:
        coordinator = stack.enter_context(_started(_COORDINATOR, **common))
        meeting = {"PACELINE_COORDINATOR": _line(coordinator).strip(), "PACELINE_MIN_WORKERS": str(world)}
        workers = [stack.enter_context(_started(_WORKER, kind, **common, **meeting)) for _ in range(world)]
        for worker in workers:  # all leave together: a worker waits for the others' goodbye
            stack.callback(lambda worker=worker: worker.stdin.close())
        yield Tree(workers)


def compare(folders: list[Path], kind: str, world: int, rounds: int) -> Iterator[str]:
    """Measures the trees; yields a row of the table for each but the first."""
    with ExitStack() as stack:
        trees = [stack.enter_context(tree_of(folder, kind, world)) for folder in folders]
        for tree in trees:
            tree.run(_WARM_UP)
        found: list[dict[int, tuple[float, float]]] = []
        for number in range(rounds):
            order = range(len(trees)) if number % 2 else reversed(range(len(trees)))
            found.append({which: trees[which].run(_STEPS) for which in order})
    for new in range(1, len(folders)):
        cells = []
        for which in (0, 1):
            olds, news = ([figures[tree][which] for figures in found] for tree in (new - 1, new))
            ratios = sorted(after / before for before, after in zip(olds, news, strict=True))
            margin = round(0.98 * len(ratios) ** 0.5)  # ranks of the median's 95 % interval
            middle = len(ratios) // 2
            low, high = ratios[max(0, middle - margin)], ratios[min(len(ratios) - 1, middle + margin)]
            cells.append(
                f"{statistics.median(olds):.1f} | {statistics.median(news):.1f} | "
                f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
            )
        yield f"| {folders[new].name} | {kind} | {world} | {cells[0]} | {cells[1]} |"


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="+")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    folders = [folder.resolve() for folder in (asked.old, *asked.new)]
    print("| tree | step | W | before, ms | this, ms | ratio | before, CPU ms | this, CPU ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in asked.kinds.split(","):
        for world in map(int, asked.worlds.split(",")):
            for row in compare(folders, kind, world, asked.rounds):
                print(row, flush=True)


if __name__ == "__main__":
    main()
