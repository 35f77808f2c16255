"""Learn to write like Python's own reference, a character at a time, with torch's DistributedDataParallel.

    paceline run -n 2 examples/torch_characters.py
    torchrun --nproc-per-node 2 examples/torch_characters.py                    started by another launcher
    torchrun --nproc-per-node 2 examples/torch_characters.py --backend gloo     on another backend

You see `epoch 1: loss 2.523, 8.1 steps/s, 2 workers on paceline`, and at the end some characters that it has written.
"""

import argparse
import os
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 64  # characters that are learned in one go

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="paceline")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=64, help="windows for each worker and step")
parser.add_argument("--write", type=int, default=200, help="characters to write at the end")
asked = parser.parse_args()


class CharacterModel(nn.Module):
    """Which character comes next, after each of some."""

    def __init__(self, characters):
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.gru = nn.GRU(64, 192, batch_first=True)
        self.scores = nn.Linear(192, characters)

    def forward(self, x, state=None):
        """From ids, [B, T], to scores, [B, T, characters], and the state to go on from."""
        seen, state = self.gru(self.embedding(x), state)
        return self.scores(seen), state


# torchrun gives a rank and where to meet; under `paceline run`, all that is the coordinator's to know.
dist.init_process_group(asked.backend, init_method="paceline://" if "PACELINE_COORDINATOR" in os.environ else "env://")
rank, world = dist.get_rank(), dist.get_world_size()

text = "\n\n".join(topics[name] for name in sorted(topics))
alphabet = sorted(set(text))
number = {character: i for i, character in enumerate(alphabet)}
ids = torch.tensor([number[character] for character in text])
windows = (len(ids) - 1) // WINDOW
data = TensorDataset(*(ids[begin : begin + windows * WINDOW].view(windows, WINDOW) for begin in (0, 1)))

torch.manual_seed(1)
model = DistributedDataParallel(CharacterModel(len(alphabet)))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
sampler = DistributedSampler(data, drop_last=True)
batches = DataLoader(data, asked.batch, sampler=sampler, drop_last=True)

for epoch in range(asked.epochs):
    sampler.set_epoch(epoch)
    began, loss_sum = time.perf_counter(), torch.zeros(())
    for x, t in batches:
        scores, _ = model(x)
        loss = cross_entropy(scores.flatten(0, 1), t.flatten())
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over all ranks meanwhile
        optimizer.step()
        loss_sum += loss.detach()
    speed = len(batches) / (time.perf_counter() - began)
    dist.all_reduce(loss_sum)
    if rank == 0:
        mean = loss_sum.item() / len(batches) / world
        print(f"epoch {epoch + 1}: loss {mean:.3f}, {speed:.1f} steps/s, {world} workers on {dist.get_backend()}")

if rank == 0:
    written, state = [number["\n"]], None
    with torch.no_grad():
        for _ in range(asked.write):
            scores, state = model.module(torch.tensor([written[-1:]]), state)
            written.append(int(torch.multinomial(scores[0, -1].softmax(0), 1)))
    print("".join(alphabet[i] for i in written).strip())
dist.destroy_process_group()
