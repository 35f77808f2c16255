"""transformers' `Trainer` on workers that may die, join and leave during training.

    from paceline_transformers import ElasticTrainer  # in place of transformers.Trainer

    paceline run -n 4 --min 1 --max 8 --restarts 3 finetune.py

The loop over the steps of an epoch is replaced. Everything else is the Trainer's own: how it makes the model, the
optimizer and the data loader, its loss, callbacks, logs, evaluation and checkpoints.
"""

from __future__ import annotations

from paceline.torch import leave_launchers_world
from paceline_transformers._trainer import ElasticTrainer

__all__ = ["ElasticTrainer"]

leave_launchers_world()
