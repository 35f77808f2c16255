"""A script for `paceline run -n 3`: trains until one of three workers has failed, and then to the end.

It trains in microbatches, so the bits are those of any number of workers. Arguments: how the worker fails ("memory",
"device", "never"), and a file for its process ID. A step takes 1 s while the third worker is waited for, and from its
failure to the end of its process: a worker that ends behind the others would have failed at the end of the job.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, for the fake device

import torch
from pytorch.fake_device import LateMark, install

import paceline
import paceline.torch
from paceline.torch._device_streams import Mark

TOTAL = 40


class _LostEvent:
    def query(self) -> bool:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with this or that.")


def main() -> None:
    how, once = sys.argv[1:]

    def waits() -> bool:
        if how == "never":
            return False
        try:
            with open(once) as file:
                os.kill(int(file.read() or 0), 0)
        except FileNotFoundError:
            return session.size < 3
        except ProcessLookupError:
            return False
        return True

    def strike() -> None:
        if how == "never" or (session.size, session.rank) != (3, 1) or os.path.exists(once):
            return
        with open(once, "x") as file:
            file.write(str(os.getpid()))
        if how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        LateMark.happened = Mark(_LostEvent(), "cuda:0 (H200, MIG-7)").happened  # type: ignore[method-assign]

    install(setattr)
    torch.manual_seed(0)
    x = torch.randn(48, 4)
    with paceline.join() as session:
        model = paceline.torch.DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), session.group)
        optimizer = torch.optim.AdamW(model.parameters())
        sampler = paceline.ElasticSampler(len(x), global_batch=12, microbatches=4)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        for step in session.steps(state, total=TOTAL):
            with step:
                time.sleep(waits())
                optimizer.zero_grad()
                for micro in step.microbatches:
                    with micro:
                        model(x[micro.indices]).square().mean().backward()
                        strike()
                optimizer.step()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
        os.write(1, f"rank {session.rank} of {session.size}: {digest}\n".encode())


main()
