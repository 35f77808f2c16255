"""Trains a model with FSDP2 inside a replica, in microbatches, and prints the digest of its weights.

Arguments: `reshard_after_forward`, as Python writes it; if wanted, a folder for checkpoints, the last step, and a step
in which rank 1 of replica 0 is killed, once, while the checkpoint of the step before is written.
"""

import ast
import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paceline
import paceline.torch

reshard, folder, total, struck = (sys.argv[1:] + ["", "12", "0"][len(sys.argv) - 2 :])[:4]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 15), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(15, 1)
)  # 15 rows are no multiple of the ranks
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
for part in (model[0], model):
    fully_shard(part, mesh=mesh, reshard_after_forward=ast.literal_eval(reshard))
generator = torch.Generator().manual_seed(1)
x, t = torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator)

with paceline.join(replica=dist.group.WORLD) as session:
    paceline.torch.replicate(model, session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = paceline.ElasticSampler(len(x), global_batch=16, microbatches=4)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(
        state, total=int(total), checkpoint_dir=folder or None, checkpoint_every=3 if folder else None
    ):
        if rank == 0:
            sys.stdout.write(f"step {step.number} of replica {session.replica}\n")
            sys.stdout.flush()
        with step:
            if (step.number, session.replica, rank) == (int(struck), 0, 1) and not os.path.exists(f"{folder}-struck"):
                open(f"{folder}-struck", "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1 if folder else 0)
            optimizer.zero_grad()
            for micro in step.microbatches:
                with micro:
                    mine = micro.indices[rank::ranks]
                    (((model(x[mine]) - t[mine]) ** 2).sum() * ranks / len(micro.indices)).backward()
            optimizer.step()
    values = b"".join(parameter.full_tensor().detach().numpy().tobytes() for parameter in model.parameters())
    sys.stdout.write(f"{session.replicas} replicas of {ranks}: {hashlib.sha256(values).hexdigest()}\n")
dist.destroy_process_group()
