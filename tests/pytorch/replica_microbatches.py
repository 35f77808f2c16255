"""Trains a model with FSDP2 inside a replica, in microbatches, and prints the digest of its weights."""

import argparse
import ast
import hashlib
import json
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

parser = argparse.ArgumentParser()
parser.add_argument("--reshard", type=ast.literal_eval, default=True, help="`reshard_after_forward`")
parser.add_argument("--total", type=int, default=12, help="the last step")
parser.add_argument("--checkpoints", help="their folder")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
parser.add_argument(
    "--strike", type=int, default=0, help="when rank 1 of replica 0 is killed once, in the step after a checkpoint"
)
parser.add_argument("--awaits", action="store_true", help="let the others hold their steps until it has come back")
parser.add_argument("--events", help="the folder in which each rank writes a file with a line for each step")
wanted = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 15), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(15, 1)
)  # 15 rows are no multiple of the ranks
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
for part in (model[0], model):
    fully_shard(part, mesh=mesh, reshard_after_forward=wanted.reshard)
generator = torch.Generator().manual_seed(1)
x, t = torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator)


def strike() -> None:
    """Kills this process, unless one was killed before."""
    try:
        open(f"{wanted.checkpoints}-struck", "x").close()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def await_the_lost() -> None:
    """Waits until the ranks of the replica that was struck have started again, and are about to join."""
    while os.path.exists(f"{wanted.checkpoints}-struck") and not all(
        os.path.exists(f"{wanted.checkpoints}-back-{position}") for position in range(ranks)
    ):
        time.sleep(0.05)


def tell(**facts: object) -> None:
    """Writes a line, which is there even if this process is killed right after."""
    if wanted.events:
        with open(f"{wanted.events}/{os.getpid()}", "a") as file:
            world = f"{os.getppid()}-{os.environ['MASTER_PORT']}"
            file.write(json.dumps({"at": time.monotonic(), "world": world, "position": rank, **facts}) + "\n")


def digest_of(tensors: object) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


tell()
if wanted.checkpoints and os.path.exists(f"{wanted.checkpoints}-struck"):
    open(f"{wanted.checkpoints}-back-{rank}", "w").close()
with paceline.join(replica=dist.group.WORLD) as session:
    paceline.torch.replicate(model, session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = paceline.ElasticSampler(len(x), global_batch=16, microbatches=4)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    every = 3 if wanted.checkpoints else None
    for step in session.steps(state, total=wanted.total, checkpoint_dir=wanted.checkpoints, checkpoint_every=every):
        if rank == 0 and not wanted.events:
            sys.stdout.write(f"step {step.number} of replica {session.replica}\n")
            sys.stdout.flush()
        with step:
            if (step.number, session.replica, rank) == (wanted.strike, 0, 1):
                strike()
            time.sleep(wanted.pace)
            if wanted.awaits:
                await_the_lost()
            optimizer.zero_grad()
            for micro in step.microbatches:
                with micro:
                    mine = micro.indices[rank::ranks]
                    (((model(x[mine]) - t[mine]) ** 2).sum() * ranks / len(micro.indices)).backward()
            optimizer.step()
        parts = [part for p in model.parameters() for part in (p, optimizer.state[p]["exp_avg"])]
        local = digest_of(part.to_local() for part in parts) if step.applied else ""
        tell(step=step.number, generation=step.generation, replicas=session.replicas, digest=local)
    entire = digest_of(parameter.full_tensor() for parameter in model.parameters())
    sys.stdout.write(f"{session.replicas} replicas of {ranks}: {entire}\n")
dist.destroy_process_group()
