"""Train the digits while workers come and go: kill some, add some, drain some; the weights match one process.

    paceline coordinator &
    paceline run -n 2 --min 1 --max 8 --restarts 3 --coordinator localhost --job digits examples/digits_elastic.py
    paceline run -n 2 --min 1 --max 8 --coordinator localhost --job digits examples/digits_elastic.py    two more

Each worker prints `generation 3: rank 1 of 4` when the set of workers has changed, and rank 0 at the end
`accuracy 0.9805 after 360 steps, 4 workers at the end`.

With `--strategy full_shard` each worker holds only its shard of the model, and a copy of another's: if a worker is
killed, the others go on with the copy. With `hybrid_shard` two workers hold the model between them, and two others hold
it too. `runs` behind it is a folder for checkpoints, in case all who hold a shard are killed.
"""

import argparse
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
parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step, like a larger model")
asked = parser.parse_args()

# 1797 real images of 8 x 8 pixels with values 0 to 16. A fixed fifth is held back to measure what was learned.
digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target
order = np.random.default_rng(0).permutation(len(images))
held_back, training = np.split(order, [len(order) // 5])
x, t = images[training], labels[training]

with paceline.join() as session:
    rng = np.random.default_rng(1)
    model = nn.Sequential(nn.Linear(64, 128, rng=rng), nn.ReLU(), nn.Linear(128, 10, rng=rng))
    if asked.strategy == "ddp":
        trained = paceline.DDP(model, session.group)
    else:
        strategy = paceline.ShardingStrategy(asked.strategy)
        node = 2 if strategy is paceline.ShardingStrategy.HYBRID_SHARD else None  # two workers hold one copy
        trained = paceline.FSDP(model, session.group, strategy, node)
    optimizer = paceline.optim.SGD(trained, lr=0.1, momentum=0.9)
    sampler = paceline.ElasticSampler(len(x), GLOBAL_BATCH)
    state = paceline.TrainState(model=trained, optimizer=optimizer, sampler=sampler)
    session.on_view(lambda: print(f"generation {session.generation}: rank {session.rank} of {session.size}"))

    total = asked.epochs * sampler.steps_per_epoch
    every = 50 if asked.checkpoints else None
    for step in session.steps(state, total=total, checkpoint_dir=asked.checkpoints, checkpoint_every=every):
        with step:  # undone, and yielded again in the next generation, if a worker is lost inside
            time.sleep(asked.pause)
            loss, dy = nn.softmax_cross_entropy(trained(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            trained.backward(dy, step.weight)
            optimizer.step()

    right = (trained(images[held_back]).argmax(axis=1) == labels[held_back]).mean()  # on all: FSDP gathers the model
    if session.rank == 0:
        print(f"accuracy {right:.4f} after {state.step} steps, {session.size} workers at the end")
