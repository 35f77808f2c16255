"""Variables by which `paceline run` tells its workers of each other."""

from __future__ import annotations

LAUNCH = "PACELINE_LAUNCH"
"""The id of the launcher's run and how many workers it started at its beginning, such as "3f9c:4"."""

TORCH_WORLD_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Those in which torch.distributed finds its world."""

TORCH_WORLD = "PACELINE_TORCH_WORLD"
"""1 where those describe all workers of `paceline run`, for scripts that do not use Paceline."""
