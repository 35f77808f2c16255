"""Train the digits while workers come and go: kill some, add some, drain some; the weights are those of one process.

paceline coordinator &
paceline run -n 2 --min 1 --max 8 --restarts 3 --coordinator localhost --job digits examples/digits_elastic.py
paceline run -n 2 --min 1 --max 8 --coordinator localhost --job digits examples/digits_elastic.py     two more, any time

With `--strategy full_shard runs` behind it each keeps only its part of the model, and `runs` the checkpoints that the
line goes on from if a part is lost with a killed worker; with `hybrid_shard` another worker has that part too.
"""

import argparse
import json
import os
import socket
import time

import numpy as np
from sklearn.datasets import load_digits

import paceline
from paceline import nn

GLOBAL_BATCH = 128

parser = argparse.ArgumentParser()
parser.add_argument("checkpoints", nargs="?", help="a folder that all workers share")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--strategy", default="ddp", choices=["ddp", *(each.value for each in paceline.ShardingStrategy)])
parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step: stands for a larger model")
parser.add_argument("--audit", help="a folder: each worker writes there which samples it used, and which steps count")
asked = parser.parse_args()

digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target
order = np.random.default_rng(0).permutation(len(images))
held_back, training = np.split(order, [len(order) // 5])
x, t = images[training], labels[training]

audit = None
if asked.audit:
    name = os.path.join(asked.audit, f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.jsonl")
    audit = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)


def note(event, **facts):
    """One line, whole even if the process is killed right after."""
    if audit is not None:
        os.write(audit, (json.dumps({"event": event, "at": time.time(), **facts}) + "\n").encode())


with paceline.join() as session:
    rng = np.random.default_rng(1)
    model = nn.Sequential(nn.Linear(64, 128, rng=rng), nn.ReLU(), nn.Linear(128, 10, rng=rng))
    if asked.strategy == "ddp":
        trained = paceline.DDP(model, session.group)
    else:
        strategy = paceline.ShardingStrategy(asked.strategy)
        node = 2 if strategy is paceline.ShardingStrategy.HYBRID_SHARD else None  # two workers have one copy
        trained = paceline.FSDP(model, session.group, strategy, node)
    optimizer = paceline.optim.SGD(trained, lr=0.1, momentum=0.9)
    sampler = paceline.ElasticSampler(len(x), GLOBAL_BATCH)
    state = paceline.TrainState(model=trained, optimizer=optimizer, sampler=sampler)
    session.on_view(lambda: print(f"generation {session.generation}: rank {session.rank} of {session.size}"))
    session.on_view(lambda: note("view", generation=session.generation, rank=session.rank, size=session.size))
    session.on_commit(lambda number: note("committed", step=number))

    total = asked.epochs * sampler.steps_per_epoch
    note("job", steps=total, samples=len(x), steps_per_epoch=sampler.steps_per_epoch)
    every = 50 if asked.checkpoints else None
    for step in session.steps(state, total=total, checkpoint_dir=asked.checkpoints, checkpoint_every=every):
        with step:  # undone, and yielded again under the next generation, if a worker is lost inside
            used = step.indices.tolist() if step.weight else []
            note("attempt", step=step.number, generation=step.generation, indices=used)
            time.sleep(asked.pause)
            loss, dy = nn.softmax_cross_entropy(trained(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            trained.backward(dy, step.weight)
            optimizer.step()
        if step.applied:
            note("applied", step=step.number, generation=step.generation)

    right = (trained(images[held_back]).argmax(axis=1) == labels[held_back]).mean()  # all: FSDP gathers the model
    if session.rank == 0:
        note("accuracy", accuracy=float(right), step=state.step)
        print(f"accuracy {right:.4f} after {state.step} steps, {session.size} workers at the end")
