"""Variables by which `paceline run` tells its workers of each other."""

from __future__ import annotations

import os

LAUNCH = "PACELINE_LAUNCH"
"""The id of the launcher's run and how many workers it started at its beginning, such as "3f9c:4"."""

TORCH_WORLD_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Those in which torch.distributed finds its world."""

TORCH_WORLD = "PACELINE_TORCH_WORLD"
"""1 where those describe all workers of `paceline run`, for scripts that do not use Paceline."""


def leave_launchers_world() -> None:
    """Removes the variables by which `paceline run` lets scripts for torchrun find each other: RANK, WORLD_SIZE, ...

    Libraries such as accelerate would make a world of torch.distributed from them, beside Paceline's. `paceline.join`
    calls this, and so do integrations when they are imported, because their hosts may look before. The world of a
    replica (`--replica-size`) stays.
    """
    if os.environ.pop(TORCH_WORLD, ""):
        for name in TORCH_WORLD_NAMES:
            os.environ.pop(name, None)
