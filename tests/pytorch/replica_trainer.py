"""A script for `paceline run --replica-size 2`: a linear model that is cut in two, whose loss needs both halves.

All numbers are whole, so sums have the same bits in every order, and with any number of replicas. Arguments: the last
step; seconds that a step takes; the instant, position and first step at which one process is struck; a folder, which
is made when that happens; "back" if the others are to wait for the replica. A step takes 1 s while one is waited for:
before one is struck there are three.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import paceline

SAMPLES = 24


def main() -> None:
    total, pace, where, who, at, then, once = sys.argv[1:]
    dist.init_process_group("gloo")
    here = dist.get_rank()

    def strike(instant: str, step: int) -> None:
        if (instant, here) != (where, int(who)) or step < int(at) or session.size < 3:
            return
        try:
            os.mkdir(once)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGTERM if instant == "leaves" else signal.SIGKILL)

    model = torch.nn.Linear(4, 2, bias=False).double()
    torch.nn.init.constant_(model.weight, 1.0 + here)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    used: dict[str, Any] = {"count": np.zeros(SAMPLES, np.int64)}
    sampler = paceline.ElasticSampler(SAMPLES, global_batch=6)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler, used=used)
    x = torch.arange(SAMPLES * 4, dtype=torch.float64).reshape(SAMPLES, 4) % 5
    with paceline.join(replica=dist.group.WORLD) as session:
        for step in session.steps(state, total=int(total)):
            with step:
                strike("begins", step.number)
                strike("leaves", step.number)
                awaits = session.size < 3 and (then == "back" or not os.path.exists(once))
                time.sleep(1.0 if awaits else float(pace))
                optimizer.zero_grad()
                y = model(x[step.indices]).sum(1)
                both = y.detach() % 7
                dist.all_reduce(both)
                strike("inside", step.number)
                (y * ((both + step.number) % 3 - 1)).sum().backward()
                counts = session.group.all_reduce(np.bincount(step.indices, minlength=SAMPLES))
                strike("between sums", step.number)
                model.weight.grad.copy_(torch.from_numpy(session.group.all_reduce(model.weight.grad.numpy())))
                strike("before the gate", step.number)
                optimizer.step()
                strike("behind the gate", step.number)
                used["count"] += counts
        digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16]
        often = sorted(set(used["count"].tolist()))
        place = f"rank {here} of {session.replica}/{session.replicas}"
        os.write(1, f"pid {os.getpid()} {place}: {digest} {often}\n".encode())
    dist.destroy_process_group()


main()
