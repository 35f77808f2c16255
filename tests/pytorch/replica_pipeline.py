"""Trains a pipeline of two stages inside a replica, in microbatches of the sampler, and prints its weights.

Arguments: the last step, and a step in which rank 1 of replica 0 is killed between two microbatches, once; a folder,
which is made when that happens.
"""

import hashlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import paceline
import paceline.torch

total, struck, once = [*sys.argv[1:], "0", ""][:3]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
stages = [
    torch.nn.Sequential(torch.nn.Linear(8, 15), torch.nn.ReLU()),
    torch.nn.Sequential(torch.nn.BatchNorm1d(15), torch.nn.Linear(15, 1)),
]
model = stages[rank]
generator = torch.Generator().manual_seed(1)
x, t = torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator)
example = torch.empty(2, (8, 15)[rank], requires_grad=rank > 0)
result = torch.empty(2, (15, 1)[rank], requires_grad=True)  # else torch runs a stage on memory that nobody has set
schedule = Schedule1F1B(
    PipelineStage(model, rank, ranks, torch.device("cpu"), input_args=example, output_args=result),
    n_microbatches=2,
    loss_fn=lambda y, t: torch.nn.functional.mse_loss(y, t),
)

with paceline.join(replica=dist.group.WORLD) as session:
    replicated = paceline.torch.replicate(model, session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = paceline.ElasticSampler(len(x), global_batch=16, microbatches=4)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(state, total=int(total)):
        with step:
            optimizer.zero_grad()
            for micro in step.microbatches:
                here = (step.number, session.replica, rank, micro.number)
                if here == (int(struck), 0, 1, 1) and not os.path.exists(once):
                    os.mkdir(once)
                    os.kill(os.getpid(), signal.SIGKILL)
                with micro:
                    with replicated.no_sync():
                        if rank == 0:
                            schedule.step(x[micro.indices])
                        else:
                            schedule.step(target=t[micro.indices])
                    replicated.sync_gradients()
            optimizer.step()
    values = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
    digest, first = hashlib.sha256(values).hexdigest()[:16], next(model.parameters()).reshape(-1)[:4].tolist()
    os.write(1, f"{session.replicas} replicas, stage {rank}: {digest} {first}\n".encode())
dist.destroy_process_group()
