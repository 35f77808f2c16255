"""Train a small GPT to write text character by character, while workers come and go.

    paceline run -n 2 --restarts 3 examples/torch_nanogpt.py
    paceline run -n 2 --restarts 3 examples/torch_nanogpt.py --text shakespeare.txt --checkpoints runs

It trains on Python's own reference, or on your text. You see, every 50 steps, the loss on text that is held back:
`step 50: held-back loss 2.61, 2 workers`; and at the end 300 characters that the model has written. Kill a worker
(`kill -9`): the others redo the interrupted step without it, and a new one joins them.
"""

import argparse
import pathlib
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import paceline.torch

WINDOW, WIDTH, HEADS, LAYERS = 64, 96, 4, 3  # characters that are seen at once; channels; heads and layers
GLOBAL_BATCH = 32  # windows of a step, over all workers

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=pathlib.Path, help="a file to learn from")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--checkpoints", help="a folder that all workers share")
asked = parser.parse_args()


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and around a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        """Maps [B, T, WIDTH] to the same shape."""
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Scores every character as the next one, at each place of a window."""

    def __init__(self, characters):
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, ids):
        """Maps ids, [B, T], to scores, [B, T, characters]."""
        return self.head(self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]]))

    @torch.no_grad()
    def write(self, ids, count):
        """Returns `ids`, [T], with `count` more."""
        for _ in range(count):
            scores = self(ids[None, -WINDOW:])[0, -1]
            ids = torch.cat([ids, torch.multinomial(scores.softmax(0), 1)])
        return ids


def loss_of(model, windows, reduction="mean"):
    """Cross-entropy of the next character, in nats, over windows of shape [B, WINDOW + 1]."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


text = asked.text.read_text() if asked.text else "\n\n".join(topics[name] for name in sorted(topics))
alphabet = sorted(set(text))
number = {character: i for i, character in enumerate(alphabet)}
windows = torch.tensor([number[character] for character in text]).unfold(0, WINDOW + 1, WINDOW)
training, held_back = windows[:-64], windows[-64:]

with paceline.join() as session:
    net = GPT(len(alphabet))
    model = paceline.torch.DDP(net, session.group)  # all begin with the first worker's weights
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    sampler = paceline.ElasticSampler(len(training), GLOBAL_BATCH)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)

    every = 100 if asked.checkpoints else None
    for step in session.steps(state, total=asked.steps, checkpoint_dir=asked.checkpoints, checkpoint_every=every):
        with step:  # undone, and yielded again in the next generation, if a worker is lost inside
            loss = loss_of(model, training[step.indices])
            optimizer.zero_grad()
            loss.backward()
            model.clip_grad_norm(1.0)
            optimizer.step()
        if step.number % 50 == 0:
            for attempt in session.retry():  # again, with other shares, if a worker is lost inside
                with attempt, torch.no_grad():
                    mine = held_back[session.rank :: session.size]
                    total = session.group.all_reduce(np.array(float(loss_of(net, mine, "sum"))))
                    if session.rank == 0:
                        mean = float(total) / held_back[:, 1:].numel()
                        print(f"step {step.number}: held-back loss {mean:.2f}, {session.size} workers", flush=True)

    if session.rank == 0:
        print("".join(alphabet[i] for i in net.write(held_back[0, :1], 300)))
