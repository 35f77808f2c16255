"""Train a small GPT on Python's own reference while workers come and go, with all that a training run usually has.

    paceline run -n 2 --min 1 --max 8 --restarts 3 examples/torch_gpt.py --export gpt.pt
    paceline run -n 2 --min 1 --restarts 3 examples/torch_gpt.py --checkpoints runs    goes on from the last one

`torch_nanogpt.py` is the short form. Here are also a loader, accumulation, a schedule, averaged weights and an export.
"""

import argparse
import contextlib
import pathlib
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
import paceline.torch

WINDOW, WIDTH, HEADS, LAYERS, DROPOUT = 64, 64, 4, 2, 0.1
GLOBAL_BATCH, MICRO_BATCH = 32, 8  # windows of a step over all workers; in one forward pass of one worker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--workers", type=int, default=1, help="processes of each worker that fetch samples")
parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path.home() / ".cache" / "paceline-gpt")
parser.add_argument("--checkpoints", help="a folder that all workers share")
parser.add_argument("--export", help="file for the averaged weights, as a plain state_dict")
asked = parser.parse_args()


class Windows(torch.utils.data.Dataset):
    """Pieces of a text: WINDOW characters, and the one that follows each."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids) // WINDOW - 1

    def __getitem__(self, index):
        begin = index * WINDOW + int(torch.randint(WINDOW, ()))  # the loader seeds it by epoch and sample
        piece = self.ids[begin : begin + WINDOW + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a shortcut."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(DROPOUT)  # each step seeds torch's generator by (seed, step, rank)

    def forward(self, x):
        """From [B, T, WIDTH] to the same."""
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.between(x)))


class GPT(nn.Module):
    """Which character comes next, after each of some."""

    def __init__(self, characters):
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, ids):
        """From ids, [B, T], to scores, [B, T, characters]."""
        x = self.characters(ids) + self.places.weight[: ids.shape[1]]
        return self.scores(self.norm(self.blocks(x)))


def loss_of(model, x, t, reduction="mean"):
    """Over all characters."""
    return F.cross_entropy(model(x).flatten(0, 1), t.flatten(), reduction=reduction)


def evaluated(session, model, windows):
    """The mean loss of windows that are not trained on. Each worker takes a part; None if it was away meanwhile."""
    mean = None
    for attempt in session.retry():  # once more, with other parts, if a worker is lost inside
        with attempt, torch.no_grad():
            mine = windows[session.rank :: session.size]
            total = float(loss_of(model, mine[:, :-1], mine[:, 1:], "sum"))
            mean = float(session.group.all_reduce(np.array(total))) / windows[:, 1:].numel()
    return mean


with paceline.once_per_host(asked.data / "complete") as first:
    if first:  # one worker of each host, whichever comes first; other scripts download here
        (asked.data / "text").write_text("\n\n".join(topics[name] for name in sorted(topics)))
text = (asked.data / "text").read_text()
number = {character: i for i, character in enumerate(sorted(set(text)))}
ids = torch.tensor([number[character] for character in text])
training, held_back = Windows(ids[: -50 * WINDOW]), ids[-50 * WINDOW :].unfold(0, WINDOW + 1, WINDOW)

# The loader comes first, so that its processes are forked before the session has threads.
with paceline.torch.ElasticDataLoader(training, num_workers=asked.workers) as loader, paceline.join() as session:
    net = GPT(len(number))
    model = paceline.torch.DDP(net, session.group)  # all workers get the weights of the first
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=asked.steps + 1)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.98)).eval()  # no dropout in what is evaluated
    sampler = paceline.ElasticSampler(len(training), GLOBAL_BATCH)
    state = paceline.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, sampler=sampler)

    every = 100 if asked.checkpoints else None
    for step in session.steps(state, total=asked.steps, checkpoint_dir=asked.checkpoints, checkpoint_every=every):
        with step:  # undone, and yielded again under the next generation, if a worker is lost inside
            x, t = loader.batch(step)
            optimizer.zero_grad()
            loss, pieces = 0.0, list(zip(x.split(MICRO_BATCH), t.split(MICRO_BATCH), strict=True))
            for i, piece in enumerate(pieces):  # gradients add up, and travel with the last piece
                with contextlib.nullcontext() if i == len(pieces) - 1 else model.no_sync():
                    piece_loss = loss_of(model, *piece) * (len(piece[0]) / len(x))
                    piece_loss.backward()
                    loss += piece_loss.item()
            model.clip_grad_norm(1.0)
            if step.number % 20 == 0:  # collectives come before the update
                loss = float(session.group.all_reduce(np.array(loss * step.weight)))  # the mean over all workers
            optimizer.step()
            scheduler.step()
            ema.update_parameters(net)  # behind the update: from there on the step counts
        if step.applied and step.number % 20 == 0 and session.rank == 0:  # rank 0 may be another worker by now
            rate = scheduler.get_last_lr()[0]
            print(f"step {step.number}: loss {loss:.3f}, rate {rate:.4f}, {session.size} workers", flush=True)
        if step.number % 100 == 0 or step.number == asked.steps:  # all workers alike: not by `step.applied`
            loss = evaluated(session, ema.module, held_back)
            if loss is not None and session.rank == 0:
                print(f"held back: loss {loss:.4f} with averaged weights", flush=True)

    if asked.export and session.rank == 0:
        torch.save(ema.module.state_dict(), asked.export)
