"""A loop of accelerate's on workers that may die, join and leave during training.

    with paceline_accelerate.Steps(accelerator, model, optimizer, loader, scheduler, epochs=3) as steps:
        for epoch in steps.epochs():
            for batch in steps:
                with steps.step, accelerator.accumulate(model):
                    loss = loss_of(model(batch))
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    accelerator.log({"loss": steps.loss}, step=steps.number)

    paceline run -n 4 --min 2 --max 8 --restarts 3 train.py

The accelerator stays in use: bf16, accumulation, clipping, schedulers, trackers and saves.
"""

from __future__ import annotations

from paceline.torch import leave_launchers_world
from paceline_accelerate._steps import Steps

__all__ = ["Steps"]

leave_launchers_world()
