"""Train an MLP on scikit-learn's handwritten digits, with the model spread over the workers.

    paceline run -n 4 examples/digits_fsdp.py                   each worker keeps a quarter of everything
    paceline run -n 4 examples/digits_fsdp.py hybrid_shard 2    nodes of two, each with the whole model
    python examples/digits_fsdp.py                              one, alone: the same weights, up to rounding

You see how many parameters each worker trains: `FULL_SHARD: rank 2 of 4 trains 4307 parameters, accuracy 0.9805`.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import paceline
from paceline import nn

EPOCHS, GLOBAL_BATCH = 15, 128

strategy = paceline.ShardingStrategy(sys.argv[1] if len(sys.argv) > 1 else "full_shard")
node = int(sys.argv[2]) if len(sys.argv) > 2 else None

# 1797 real images of 8 x 8 pixels with values 0 to 16. A fixed fifth is held back to measure what was learned.
digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target
order = np.random.default_rng(0).permutation(len(images))
held_back, training = np.split(order, [len(order) // 5])
x, t = images[training], labels[training]

with paceline.join() as session:  # where to, the launcher says in PACELINE_*
    rng = np.random.default_rng(1)

    def unit(module):
        """Parameters that become whole together, while they are needed."""
        return paceline.FSDP(module, session.group, strategy, node)

    fsdp = unit(
        nn.Sequential(
            unit(nn.Linear(64, 128, rng=rng)),
            nn.ReLU(),
            unit(nn.Linear(128, 64, rng=rng)),
            nn.ReLU(),
            unit(nn.Linear(64, 10, rng=rng)),
        )
    )
    optimizer = paceline.optim.Adam(fsdp, lr=2e-3)  # of the wrapper: it trains, and keeps state for, this worker's part
    sampler = paceline.ElasticSampler(len(x), GLOBAL_BATCH, seed=0)

    for step in range(EPOCHS * sampler.steps_per_epoch):
        # This worker's share of the global batch, and what it counts in the mean over all workers.
        indices, weight = sampler.share(step, session.rank, session.size)
        loss, dy = nn.softmax_cross_entropy(fsdp(x[indices]), t[indices])

        optimizer.zero_grad()
        fsdp.backward(dy, weight)  # each unit's gradients leave as soon as its backward pass is done
        fsdp.clip_grad_norm(1.0)  # over all workers' parts
        optimizer.step()

    right = (fsdp(images[held_back]).argmax(axis=1) == labels[held_back]).mean()  # all workers: parameters are gathered
    held = sum(parameter.data.size for _, parameter in fsdp.named_parameters())
    print(f"{strategy.name}: rank {session.rank} of {session.size} trains {held} parameters, accuracy {right:.4f}")
