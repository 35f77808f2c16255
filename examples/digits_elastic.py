"""Train the digits while workers come and go: kill some, add some, drain some; the weights are those of one process.

paceline coordinator &
paceline run -n 2 --min 1 --max 8 --restarts 3 --coordinator localhost --job digits examples/digits_elastic.py
paceline run -n 2 --min 1 --max 8 --coordinator localhost --job digits examples/digits_elastic.py     two more, any time
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import paceline
from paceline import nn

EPOCHS, GLOBAL_BATCH = 30, 128

digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target
order = np.random.default_rng(0).permutation(len(images))
held_back, training = np.split(order, [len(order) // 5])
x, t = images[training], labels[training]

with paceline.join() as session:
    rng = np.random.default_rng(1)
    model = nn.Sequential(nn.Linear(64, 128, rng=rng), nn.ReLU(), nn.Linear(128, 10, rng=rng))
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(model, lr=0.1, momentum=0.9)
    sampler = paceline.ElasticSampler(len(x), GLOBAL_BATCH)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    session.on_view(lambda: print(f"generation {session.generation}: rank {session.rank} of {session.size}"))

    total = EPOCHS * sampler.steps_per_epoch
    checkpoints = sys.argv[1] if len(sys.argv) > 1 else None
    for step in session.steps(state, total=total, checkpoint_dir=checkpoints, checkpoint_every=checkpoints and 50):
        with step:  # undone, and yielded again under the next generation, if a worker is lost inside
            loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            optimizer.step()

    if session.rank == 0:
        right = (model.forward(images[held_back]).argmax(axis=1) == labels[held_back]).mean()
        print(f"accuracy {right:.4f} after {state.step} steps, {session.size} workers at the end")
