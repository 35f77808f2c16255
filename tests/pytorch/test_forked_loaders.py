"""A DataLoader whose workers are forked, beside the backend and in the elastic loop.

Processes are started anew, in an environment without grpc's variables: what grpc reads when it is first imported
matters here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.testing import coordinator

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest, pytest.mark.slow, pytest.mark.timeout(300)]

ROUNDS = 20

DATA = f"""
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.ones(8, 1), torch.zeros(8, 1))
rounds = {ROUNDS}

def batches():
    return DataLoader(data, batch_size=4, num_workers=2)
"""

BACKEND = (
    DATA
    + """
import torch.distributed as dist

dist.init_process_group("paceline")
total = 0.0
for _ in range(rounds):
    for x, _ in batches():
        part = x.sum()
        dist.all_reduce(part)
        total += part.item()
print(f"all rounds: {total / dist.get_world_size():g}", flush=True)
dist.destroy_process_group()
"""
)

LOOP = (
    DATA
    + """
import paceline, paceline.torch

read = 0.0
with paceline.join(min_workers=2) as session:
    model = paceline.torch.DDP(torch.nn.Linear(1, 1), session.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = paceline.TrainState(model=model, optimizer=optimizer)
    for step in session.steps(state, total=rounds):
        with step:
            for x, y in batches():
                read += x.sum().item()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
print(f"all rounds: {read:g}", flush=True)
"""
)


def run(*command: str, **more: str) -> str:
    """What a command prints, in this process's environment but for what Paceline has set there for grpc."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, *command], env=clean | more, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_forked_loader_workers_with_the_backend_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BACKEND)
    printed = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert printed.count(f"all rounds: {8 * ROUNDS}") == 2, printed


def test_forked_loader_workers_in_session_steps(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOP)
    with coordinator() as address, ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(run, str(script), PACELINE_COORDINATOR=address) for _ in range(2)]
        for worker in workers:
            assert f"all rounds: {8 * ROUNDS}" in worker.result()
