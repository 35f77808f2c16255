"""Measure the accuracy during training, all workers together, while workers come and go.

    paceline run -n 3 --min 2 --restarts 3 examples/digits_evaluation.py

You see `epoch 5: accuracy 0.9554, 3 workers`. Each worker reads its share of the held-back digits, and their counts are
summed. `session.retry()` runs the block again, with other shares, if a worker is lost inside of it.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

import paceline
from paceline import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
asked = parser.parse_args()

# 1797 real images of 8 x 8 pixels with values 0 to 16. A fixed fifth is held back to measure what was learned.
digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target
order = np.random.default_rng(0).permutation(len(images))
held_back, training = np.split(order, [len(order) // 5])
x, t = images[training], labels[training]


def evaluate(session, model):
    """Returns the share of held-back digits that the model reads right; None on a worker that was away meanwhile."""
    accuracy = None
    for attempt in session.retry():
        with attempt:
            mine = held_back[session.rank :: session.size]
            right = (model.forward(images[mine]).argmax(axis=1) == labels[mine]).sum()
            accuracy = int(session.group.all_reduce(np.array(right))) / len(held_back)
    return accuracy


with paceline.join() as session:
    rng = np.random.default_rng(1)
    model = nn.Sequential(nn.Linear(64, 128, rng=rng), nn.ReLU(), nn.Linear(128, 10, rng=rng))
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(ddp, lr=0.1, momentum=0.9)
    sampler = paceline.ElasticSampler(len(x), global_batch=128)
    state = paceline.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)

    for step in session.steps(state, total=asked.epochs * sampler.steps_per_epoch):
        with step:
            loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            optimizer.step()

        # All workers must decide alike: by `step.number`, not by `step.applied`, which may differ between them.
        epoch, rest = divmod(step.number, sampler.steps_per_epoch)
        if rest == 0 and epoch % 5 == 0:
            accuracy = evaluate(session, model)
            if accuracy is not None and session.rank == 0:
                print(f"epoch {epoch}: accuracy {accuracy:.4f}, {session.size} workers", flush=True)
