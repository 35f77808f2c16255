"""Ranks of torch.distributed in real processes, which meet as scripts do: by `env://`, on the backend "paceline"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.ports import free_port
from support.processes import Worker

__all__ = ["finish", "torch_ranks"]

_PRELUDE = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(os.environ.get("BACKEND", "paceline"))
"""


@contextmanager
def torch_ranks(world: int, code: str, **environment: str) -> Iterator[list[Worker]]:
    """Starts processes that have a process group; `rank`, `world`, `torch` and `dist` are there.

    Args:
        world: how many.
        code: what each runs; it may `emit`.
        environment: further variables.
    """
    port = str(free_port())  # torch's own store wants to be told one
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
    started = [Worker(_PRELUDE + code, {"RANK": str(rank), **meeting}) for rank in range(world)]
    try:
        yield started
    finally:
        for worker in started:
            worker.close()


def finish(world: int, code: str, timeout: float = 60.0, **environment: str) -> None:
    """Runs code on all ranks; all must come to its end."""
    ending = "\ndist.destroy_process_group()\nemit('done')\n"
    with torch_ranks(world, code + ending, **environment) as started:
        for worker in started:
            worker.expect("done", timeout)
        assert [worker.wait() for worker in started] == [0] * world
