"""Lightning's `Trainer` on workers that may die, join and leave during training.

    import paceline_lightning
    trainer = lightning.Trainer(strategy="paceline")

    paceline run -n 4 --min 1 --max 8 --restarts 3 train.py

The fit loop is replaced by one over the steps of a session. Everything else is Lightning's own: the module and its
hooks, the passes, callbacks, loggers, validation and checkpoints.
"""

from __future__ import annotations

import os

from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from paceline.torch import leave_launchers_world
from paceline_lightning._strategy import PacelineStrategy

__all__ = ["PacelineStrategy"]

leave_launchers_world()

if PacelineStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(PacelineStrategy.strategy_name, PacelineStrategy, "Workers that may come and go")
if "PACELINE_LOCAL_RANK" in os.environ:
    rank_zero_only.rank = int(os.environ["PACELINE_LOCAL_RANK"])  # one worker of a host prints messages
