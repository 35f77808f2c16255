"""A script for `paceline run --replica-size 2`: LocalSGD or DiLoCo between replicas, with FSDP2 or TP inside.

Arguments: the method; the inner optimizer; what is inside, "fsdp" or "tp"; microbatches, 0 for none; the last round;
the instant, position and first round at which one process is struck; a folder, which is made when that happens.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import paceline
import paceline.torch

SAMPLES, BATCH, INNER = 48, 24, 3


def main() -> None:
    method, optimizer, inside, microbatches, total, where, who, at, once = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    struck = os.path.exists(once)

    def strike(instant: str, number: int) -> None:
        nonlocal struck
        if (instant, rank) != (where, int(who)) or struck or number < int(at) or session.size < 2:
            return
        struck = True
        try:
            os.mkdir(once)
        except FileExistsError:  # the other replica is struck: its end is known at this rank, and its mate waits
            time.sleep(1.0)
            return
        time.sleep(0.5)  # the other lane may have gone on by then
        os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    x, t = torch.randn(SAMPLES, 6).double(), torch.randn(SAMPLES, 3).double()
    if inside == "fsdp":  # 3 rows are no multiple of the ranks
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def loss_of(batch: Any) -> Any:
        mine = batch[rank::ranks] if inside == "fsdp" else batch
        loss = ((model(x[mine]) - t[mine]) ** 2).sum() / len(batch)
        return loss * ranks if inside == "fsdp" else loss

    inner = getattr(torch.optim, optimizer)(model.parameters(), lr=0.02)
    with paceline.join(replica=dist.group.WORLD) as session:
        local = getattr(paceline.torch, method)(model, inner, session.group)
        outer = local.outer_optimizer.step

        def outer_step() -> None:
            strike("behind the gate", now)
            outer()

        local.outer_optimizer.step = outer_step
        made: list[int] = []
        sampler = paceline.ElasticSampler(SAMPLES, BATCH, microbatches=int(microbatches))
        state = paceline.TrainState(model=local, sampler=sampler)
        for step in session.steps(state, total=int(total)):
            made.append(0)
            with step:
                now = step.number

                def take(batch: Any, now: int = step.number) -> None:
                    loss_of(batch).backward()
                    strike("inner", now)
                    inner.step()
                    inner.zero_grad()
                    made[-1] += 1

                if int(microbatches):
                    for micro in step.microbatches:
                        with micro:
                            for batch in local.replica_batches(micro, INNER):
                                take(batch)
                                if made[-1] == 2 * INNER:  # all of this rank, if there are two replicas
                                    strike("behind the inner steps", now)
                else:
                    for batch in local.batches(step.indices, INNER):
                        take(batch)
                    with torch.no_grad():
                        loss_of(step.indices)  # FSDP2 gathers, and no backward pass follows
                dist.barrier()  # a mate alone would hang here
                strike("before the gate", now)
                local.outer_step(None if int(microbatches) else step.weight)
        with torch.no_grad():
            whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        values = torch.cat([p.detach().reshape(-1) for p in whole])
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
        rest = hashlib.sha256(b"".join(a.tobytes() for a in state._core.large())).hexdigest()[:16]
        place = f"rank {rank} of {session.replica}/{session.replicas}"
        short, found = [count for count in made if count < INNER], values[:4].tolist()
        os.write(1, f"pid {os.getpid()} {place}: {digest} {rest}, short {short}, found {found}\n".encode())
    dist.destroy_process_group()


main()
