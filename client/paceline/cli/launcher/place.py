"""Where a launcher's workers stand in a world that is known before they start, and how torch is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Place", "torch_variables"]

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True)
class Place:
    """One launcher (torchrun's node) among those of a world of fixed size.

    Attributes:
        workers: how many it starts.
        world_size: how many all launchers start together.
        first_rank: of its first worker; the others' follow.
        node: its number among the launchers.
        nodes: how many launchers there are.
        master_addr: where rank 0 is reached.
        master_port: a port there that is free for rank 0 to listen at.
        run_id: name of the run.
        restart: how often the world was started again after failures.
        max_restarts: how often that is done at most.
    """

    workers: int
    world_size: int
    first_rank: int
    node: int
    nodes: int
    master_addr: str
    master_port: int
    run_id: str
    restart: int = 0
    max_restarts: int = 0


def torch_variables(place: Place, index: int) -> dict[str, str]:
    """What `torchrun` sets for a worker (environment variables of torch.distributed.run), and scripts read.

    Args:
        place: of the launcher.
        index: of the worker among those of its launcher, from 0.
    """
    rank, world_size = str(place.first_rank + index), str(place.world_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(place.workers),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        # The launcher has no store of torch's: rank 0 opens the one at MASTER_PORT.
        _AGENT_STORE: "False",
    }
