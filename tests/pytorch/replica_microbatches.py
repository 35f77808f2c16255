"""Trains a model with FSDP2 inside a replica, in microbatches, and prints the digest of its weights.

Its argument is `reshard_after_forward`, as Python writes it.
"""

import ast
import hashlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paceline
import paceline.torch

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 15), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(15, 1)
)  # 15 rows are no multiple of the ranks
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
for part in (model[0], model):
    fully_shard(part, mesh=mesh, reshard_after_forward=ast.literal_eval(sys.argv[1]))
generator = torch.Generator().manual_seed(1)
x, t = torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator)

with paceline.join(replica=dist.group.WORLD) as session:
    paceline.torch.replicate(model, session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = paceline.ElasticSampler(len(x), global_batch=16, microbatches=4)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(state, total=12):
        with step:
            optimizer.zero_grad()
            for micro in step.microbatches:
                with micro:
                    mine = micro.indices[rank::ranks]
                    (((model(x[mine]) - t[mine]) ** 2).sum() * ranks / len(micro.indices)).backward()
            optimizer.step()
    values = b"".join(parameter.full_tensor().detach().numpy().tobytes() for parameter in model.parameters())
    sys.stdout.write(f"{session.replicas} replicas of {ranks}: {hashlib.sha256(values).hexdigest()}\n")
