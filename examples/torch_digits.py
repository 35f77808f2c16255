"""Train a CNN of torch on the digits while workers come and go: kill some, add some; each sample is used once.

    paceline coordinator &
    paceline run -n 2 --min 1 --max 8 --restarts 3 --coordinator localhost --job digits examples/torch_digits.py
    paceline run -n 2 --min 1 --max 8 --coordinator localhost --job digits examples/torch_digits.py    two more

Each worker prints `generation 3: rank 1 of 4` when the set of workers has changed, and rank 0 at the end
`accuracy 0.9833 after 120 steps, 4 workers at the end`. The loop is torch's; new are `paceline.torch.DDP`, the
sampler, and `session.steps` with its `with step:`.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
import paceline.torch

GLOBAL_BATCH = 128

parser = argparse.ArgumentParser()
parser.add_argument("checkpoints", nargs="?", help="a folder that all workers share")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument(
    "--pause", type=float, default=0.0, help="seconds to sleep in each step, as a larger model would take"
)
asked = parser.parse_args()

# 1797 real images of 8 x 8 pixels with values 0 to 16. A fixed fifth is held back to measure what was learned.
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_back, training = order[: len(order) // 5], order[len(order) // 5 :]
x, t = images[training], labels[training]

with paceline.join() as session:
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )
    model = paceline.torch.DDP(net, session.group)  # the weights of the first worker, whoever comes
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    sampler = paceline.ElasticSampler(len(x), GLOBAL_BATCH)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    session.on_view(lambda: print(f"generation {session.generation}: rank {session.rank} of {session.size}"))

    total = asked.epochs * sampler.steps_per_epoch
    every = 50 if asked.checkpoints else None
    for step in session.steps(state, total=total, checkpoint_dir=asked.checkpoints, checkpoint_every=every):
        with step:  # undone, and yielded again under the next generation, if a worker is lost inside
            time.sleep(asked.pause)
            loss = cross_entropy(model(x[step.indices]), t[step.indices])  # the mean over this worker's share
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        right = (model(images[held_back]).argmax(1) == labels[held_back]).float().mean()
    if session.rank == 0:
        print(f"accuracy {right:.4f} after {state.step} steps, {session.size} workers at the end")
