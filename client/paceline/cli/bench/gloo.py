"""Gloo's ranks in `paceline bench --vs gloo`: python -m paceline.cli.bench.gloo SOCKET NAME WORLD.

torch.distributed's own calls on float32 tensors, with a thread for arithmetic in each process as Paceline's ranks have.
Ranks number themselves in a file beside the conductor's socket, over which they also find each other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.bench.calls import Call
from paceline.cli.bench.rank import Lacking, Ranks, serve
from paceline.cli.bench.sizes import ELEMENT_BYTES
from paceline.cli.bench.values import ROOT, given

__all__ = ["GlooRanks", "main"]


class GlooRanks(Ranks):
    """A rank of the default process group (`rank.Ranks`).

    Args:
        torch: PyTorch, which only processes of this contender load.
    """

    def __init__(self, torch: Any) -> None:
        self._torch, self._dist = torch, torch.distributed
        self.rank, self.world = self._dist.get_rank(), self._dist.get_world_size()

    def barrier(self) -> None:
        """The process group's own."""
        self._dist.barrier()

    def links(self, collective: str) -> Sequence[str]:
        """Gloo's only transport here, between processes of one host too."""
        return ["tcp"]

    def lacks(self, error: RuntimeError) -> bool:
        """What a version's Gloo does not have it refuses, at all ranks and before anything is sent."""
        return isinstance(error, NotImplementedError) or "not support" in str(error)

    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """all_reduce, reduce and broadcast are in place: torch.distributed has no others."""
        torch, dist = self._torch, self._dist
        # The older names warn at every call, which costs as much as a small collective.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        rank, world, at_root = self.rank, self.world, self.rank == ROOT
        n = size // ELEMENT_BYTES
        part = n // world

        def full(n: int, *, in_place: bool = False) -> Any:
            return torch.full((n,), given(rank, world, in_place=in_place), dtype=torch.float32)

        def empty(n: int) -> Any:
            return torch.zeros(n, dtype=torch.float32)

        match collective:
            case "all_reduce" if place == "out":
                raise Lacking("torch.distributed sums in place only")
            case "all_reduce":
                x = full(n, in_place=True)
                return Call(lambda: dist.all_reduce(x), x.numpy(), in_place=True)
            case "reduce":
                x = full(n, in_place=True)
                return Call(lambda: dist.reduce(x, ROOT), x.numpy(), in_place=True)
            case "reduce_scatter":
                x, out = full(n), empty(part)
                return Call(lambda: reduce_scatter(out, x), out.numpy())
            case "broadcast":
                x = full(n)
                return Call(lambda: dist.broadcast(x, ROOT), x.numpy())
            case "scatter":
                xs, out = list(full(n).chunk(world)) if at_root else None, empty(part)
                return Call(lambda: dist.scatter(out, xs, src=ROOT), out.numpy())
            case "all_gather":
                x, out = full(part), empty(n)
                return Call(lambda: all_gather(out, x), out.numpy())
            case "gather":
                x, at = full(part), empty(n) if at_root else None
                parts = list(at.chunk(world)) if at is not None else None
                return Call(lambda: dist.gather(x, parts, dst=ROOT), None if at is None else at.numpy())
            case "all_to_all":
                x, out = full(n), empty(n)
                return Call(lambda: dist.all_to_all_single(out, x), out.numpy())
            case "send_recv":
                x, out = full(n), empty(n)
                return Call(lambda: _shift(dist, rank, world, x, out), out.numpy())
            case "barrier":
                return Call(dist.barrier, None)
        raise Lacking(f"there is no {collective}")


def _shift(dist: Any, rank: int, world: int, x: Any, out: Any) -> None:
    works = (dist.isend(x, (rank + 1) % world), dist.irecv(out, (rank - 1) % world))
    for work in works:
        work.wait()


def main(path: str, name: str, world: int) -> None:
    """Serves the conductor until it ends the bench."""
    import torch
    import torch.distributed as dist

    folder = Path(path).parent
    rank = dist.FileStore(str(folder / "gloo-ranks"), world).add("ranks", 1) - 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "gloo").as_uri(), rank=rank, world_size=world)
    try:
        serve(path, name, GlooRanks(torch))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
