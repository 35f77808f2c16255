"""Start here: train a CNN while workers come and go. Read from top to bottom; it is all of the elastic loop.

    paceline run --job digits -n 2 --min 1 --restarts 3 examples/01_elastic_digits.py --pause 0.2
    paceline status digits      in another terminal: the workers and their pids, of which you `kill -9` one

The other worker prints `generation 3: rank 0 of 1` and trains on, a new one joins it (`generation 4: rank 0 of 2`), and
rank 0 prints at the end `accuracy 0.9749 after 120 steps, 2 workers at the end`: no step and no sample was lost.

Without PyTorch read `digits_elastic.py`, which is the same for NumPy.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
import paceline.torch

parser = argparse.ArgumentParser()
parser.add_argument("checkpoints", nargs="?", help="a folder that all workers share")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step, like a larger model")
asked = parser.parse_args()

# 1797 real images of 8 x 8 pixels with values 0 to 16. A fixed fifth is held back to measure what was learned. Every
# worker has all the data: which samples it trains on is decided in each step.
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_back, training = order[: len(order) // 5], order[len(order) // 5 :]
x, t = images[training], labels[training]

# 1. Join the job. `paceline run` has put its name and the coordinator's address into the environment. A process that is
#    started without it trains alone.
with paceline.join() as session:
    # 2. Build model and optimizer as always. Workers need not agree on the first values: all take those of one of them,
    #    and a worker that comes later takes the state of the others. DDP averages gradients while they are computed.
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )
    model = paceline.torch.DDP(net, session.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    # 3. The sampler gives each worker its share of the batch, of whatever size the world is. The batch counts all
    #    workers together, so the learning rate need not change when they do.
    sampler = paceline.ElasticSampler(len(x), global_batch=128)

    # 4. Say what training changes. This is what a newcomer is given, what a checkpoint holds, and what is the same on
    #    all workers after each step.
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)

    # A generation is a set of workers that train together. When one is lost or joins, the next generation begins, in
    # which each has another rank. So do nothing by rank before the loop.
    session.on_view(lambda: print(f"generation {session.generation}: rank {session.rank} of {session.size}"))

    # 5. Take steps. The loop goes on where the state is: at the first step, at that of the others, or at that of the
    #    latest checkpoint, if all workers had ended.
    total = asked.epochs * sampler.steps_per_epoch
    every = 50 if asked.checkpoints else None
    for step in session.steps(state, total=total, checkpoint_dir=asked.checkpoints, checkpoint_every=every):
        # 6. If a worker is lost inside this block, the step is undone on the others, and the loop yields it again in
        #    the next generation. `with step` keeps the error from your code.
        with step:
            time.sleep(asked.pause)
            loss = cross_entropy(model(x[step.indices]), t[step.indices])  # the mean over this worker's share
            optimizer.zero_grad()
            loss.backward()  # ends with the mean over the whole batch, on every worker
            optimizer.step()  # waits until all workers have come this far: the only place where the state changes
        session.log(loss=loss.item())  # `paceline run --http` and `paceline status` show it

    # 7. Here the last step is committed, and its checkpoint is on disk. All workers hold the same weights.
    with torch.no_grad():
        right = (model(images[held_back]).argmax(1) == labels[held_back]).float().mean()
    if session.rank == 0:
        print(f"accuracy {right:.4f} after {state.step} steps, {session.size} workers at the end")
