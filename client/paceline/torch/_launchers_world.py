"""The world of torch.distributed that `paceline run` describes to scripts for torchrun."""

from __future__ import annotations

import os

from paceline._base.launcher_variables import TORCH_WORLD, TORCH_WORLD_NAMES


def leave_launchers_world() -> None:
    """Removes the variables by which `paceline run` lets scripts for torchrun find each other: RANK, WORLD_SIZE, ...

    Libraries such as accelerate would make a world of torch.distributed from them, beside Paceline's. Their
    integrations call this when they are imported. The world of a replica (`--replica-size`) stays.
    """
    if os.environ.pop(TORCH_WORLD, ""):
        for name in TORCH_WORLD_NAMES:
            os.environ.pop(name, None)
