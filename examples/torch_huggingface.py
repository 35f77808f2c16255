"""Train a Hugging Face model while workers come and go. It is made from a config, so nothing is downloaded.

    pip install transformers
    paceline run -n 2 --restarts 3 examples/torch_huggingface.py
    paceline run -n 2 --restarts 3 examples/torch_huggingface.py --checkpoints runs --save my-gpt2

It learns Python's own reference, byte by byte. You see `step 20: loss 2.93, 2 workers`, and with `--save` a folder that
`GPT2LMHeadModel.from_pretrained` reads. For a model of yours, put `AutoModelForCausalLM.from_pretrained(NAME)` and its
tokenizer here, and download inside of `paceline.once_per_host`.
"""

import argparse
from pydoc_data.topics import topics

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import paceline
import paceline.torch

WINDOW, GLOBAL_BATCH = 64, 32  # bytes in a sample; samples of a step, over all workers
CONFIG = GPT2Config(vocab_size=256, n_positions=WINDOW, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--checkpoints", help="a folder that all workers share")
parser.add_argument("--save", help="a folder for the model, as `save_pretrained` writes it")
asked = parser.parse_args()

text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
samples = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, WINDOW, WINDOW)

with paceline.join() as session:
    net = GPT2LMHeadModel(CONFIG)
    model = paceline.torch.DDP(net, session.group)  # all begin with the first worker's weights
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=asked.steps + 1)
    sampler = paceline.ElasticSampler(len(samples), GLOBAL_BATCH)
    state = paceline.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)

    every = 50 if asked.checkpoints else None
    for step in session.steps(state, total=asked.steps, checkpoint_dir=asked.checkpoints, checkpoint_every=every):
        with step:  # undone, and yielded again in the next generation, if a worker is lost inside
            batch = samples[step.indices]
            loss = model(input_ids=batch, labels=batch).loss  # the mean over this worker's samples
            optimizer.zero_grad()
            loss.backward()
            model.clip_grad_norm(1.0)
            mean = session.group.all_reduce(np.array(loss.item() * step.weight))  # before the update
            optimizer.step()
            scheduler.step()
        if step.applied and step.number % 20 == 0 and session.rank == 0:
            print(f"step {step.number}: loss {float(mean):.2f}, {session.size} workers", flush=True)

    if asked.save and session.rank == 0:
        net.save_pretrained(asked.save)
