"""Train a CNN over a slow network with DiLoCo: the workers talk once in 20 steps, and may come and go between.

    paceline run -n 2 --restarts 3 examples/torch_diloco.py
    paceline run -n 2 --restarts 3 examples/torch_diloco.py --inner-steps 50 --compression int8

In a round each worker takes 20 inner steps alone; then their changes are averaged, and all take one outer step. You see
`round 10: accuracy 0.96, 2 workers, 0.3 MB sent`, of which `--compression int8` leaves a quarter. A round in which a
worker is lost is undone and redone.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
import paceline.torch

BATCH = 32  # samples of an inner step of one worker

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--inner-steps", type=int, default=20, help="steps of each worker between two exchanges")
parser.add_argument("--compression", choices=["bf16", "int8"], help="send fewer bytes")
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
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3)
    model = paceline.torch.DiLoCo(net, inner, session.group, compression=asked.compression)
    sampler = paceline.ElasticSampler(len(x), per_rank_batch=asked.inner_steps * BATCH)  # each worker's in a round
    state = paceline.TrainState(model=model, sampler=sampler)

    for step in session.steps(state, total=asked.rounds):  # a step is a round
        with step:
            for batch in model.batches(step.indices, asked.inner_steps):
                cross_entropy(net(x[batch]), t[batch]).backward()
                inner.step()  # alone: nothing is sent
                inner.zero_grad()
            model.outer_step(step.weight)  # together
        if step.applied and step.number % 10 == 0 and session.rank == 0:
            with torch.no_grad():  # the same on every worker
                right = (net(images[held_back]).argmax(1) == labels[held_back]).float().mean()
            sent = session.group.bytes_sent / 1e6  # in this generation
            print(f"round {step.number}: accuracy {right:.2f}, {session.size} workers, {sent:.1f} MB sent", flush=True)
