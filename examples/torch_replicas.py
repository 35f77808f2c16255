"""Train an MLP on scikit-learn's handwritten digits in replicas: ranks that hold one copy of the model between them.

    paceline run -n 4 --replica-size 2 examples/torch_replicas.py             two replicas, with FSDP2 inside
    paceline run -n 4 --replica-size 2 examples/torch_replicas.py tp          tensor parallelism inside
    paceline run -n 4 --replica-size 2 examples/torch_replicas.py pipeline    a pipeline of two stages inside

With `--min 1 --restarts 3` behind `run` you may kill any process: the other replica trains on, and all ranks of its
replica start again and take the state from the other one. You see `tp: 2 replicas of 2, loss 0.0211 after 340 steps`.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import paceline
import paceline.torch

STEPS, GLOBAL_BATCH, PADDING = 340, 64, -100

inside = sys.argv[1] if len(sys.argv) > 1 else "fsdp"
digits = load_digits()
x, t = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)

dist.init_process_group("gloo")  # torch's world is this worker's replica
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(inside,))

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU()),
    torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)),
)
if inside == "fsdp":
    for block in [*model, model]:
        fully_shard(block, mesh=mesh)
elif inside == "tp":
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
else:
    model[1 - rank] = torch.nn.Identity()  # one stage for each of two ranks, with its names in the entire model
    losses, samples = [], 0
    schedule = Schedule1F1B(
        PipelineStage(model, rank, ranks, torch.device("cpu")),
        n_microbatches=4,
        loss_fn=lambda y, t: cross_entropy(y, t, ignore_index=PADDING, reduction="sum") / samples,
        scale_grads=False,
    )

with paceline.join(replica=dist.group.WORLD) as session:
    replicated = paceline.torch.replicate(model, session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = paceline.ElasticSampler(len(x), GLOBAL_BATCH)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)

    for step in session.steps(state, total=STEPS):
        with step:
            indices = step.indices  # of the replica: the same on all its ranks
            optimizer.zero_grad()
            if inside == "fsdp":  # FSDP2 takes the mean over its ranks, which may have one sample more or less
                mine = indices[rank::ranks]
                loss = cross_entropy(model(x[mine]), t[mine], reduction="sum") * ranks / len(indices)
                loss.backward()
            elif inside == "tp":
                loss = cross_entropy(model(x[indices]), t[indices])
                loss.backward()
            else:  # whose microbatches have one size, whatever the number of replicas
                samples, padding = len(indices), GLOBAL_BATCH - len(indices)
                rows = torch.nn.functional.pad(x[indices], (0, 0, 0, padding))
                targets = torch.nn.functional.pad(t[indices], (0, padding), value=PADDING)
                with replicated.no_sync():
                    if rank == 0:
                        schedule.step(rows)
                    else:
                        losses.clear()
                        schedule.step(target=targets, losses=losses)
                        loss = sum(losses)
                replicated.sync_gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of a pipeline: each stage by itself
            optimizer.step()

    if session.replica == 0 and rank == ranks - 1:
        print(f"{inside}: {session.replicas} replicas of {ranks}, loss {loss.item():.4f} after {STEPS} steps")
